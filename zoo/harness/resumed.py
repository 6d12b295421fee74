"""The case of entries about checkpoints: a candidate in two launches, with another layout in the second.

The first trains two steps and saves torch's distributed checkpoint; the second loads it and trains the third. The
reference trains three steps in one process. A patch changes what was read from the checkpoint before it is put into the
model and the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import distribute_tensor

from ttrace.capture.plan import Plan
from zoo.bug import Judge, Launcher
from zoo.harness.breaking import SHAPE
from zoo.harness.candidate import Candidate, Cell, simple
from zoo.harness.cells import LAYOUTS, Traced, attached, shared_out
from zoo.harness.plans import planned
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import NUM_TWINS
from zoo.harness.transformer import Transformer
from zoo.launch import TIMEOUT, Sided, patched
from zoo.seen import Seen

NUM_STEPS = 3
DECAY = 0.5
"""The learning rate after a step, by that before it."""
MODEL = replace(SHAPE, vocab=50, tied=False)
"""Two and four ranks have uneven shares of its vocabulary."""
FIRST = Cell("fsdp", 2, num_microbatches=2)


@dataclass
class Loaded:
    """What was read from a checkpoint, for this rank."""

    candidate: Candidate
    model: dict[str, Any]
    optimizer: dict[str, Any]
    """The states of the optimizer: `state` by parameter, and `param_groups`."""
    initial: Mapping[str, torch.Tensor]
    """The parameters before the first step of all, whole."""

    @property
    def moments(self) -> Mapping[str, dict[str, Any]]:
        """The optimizer's state of each parameter."""
        return cast(Mapping[str, dict[str, Any]], self.optimizer["state"])


@dataclass(frozen=True)
class Resumed:
    """The layout of the second launch."""

    second: Cell = Cell("fsdp", 4, num_microbatches=1)  # noqa: RUF009  # cells are immutable

    @property
    def num_ranks(self) -> int:
        return self.second.num_ranks

    @property
    def launcher(self) -> Launcher:
        return on_two_launches


def on_two_launches(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    """The launcher of checkpoints: the reference and what comes before the checkpoint are alike for all runs."""
    begin = time.monotonic()
    _trace_reference(folder)
    timeout = TIMEOUT * (5 + len(runs))
    on_ranks(FIRST.num_ranks, _save, folder, timeout=timeout)
    seconds = time.monotonic() - begin
    kept: list[Seen] = on_ranks(num_ranks, _resume_all, runs, folder, judge, timeout=timeout)[0]
    return [replace(kept[0], seconds=kept[0].seconds + seconds), *kept[1:]]


def _trace_reference(folder: Path) -> None:
    cell = replace(FIRST, num_microbatches=FIRST.num_microbatches * FIRST.num_ranks)
    for twin in range(NUM_TWINS + 1):
        torch.manual_seed(0)
        candidate = simple(Transformer(MODEL), MODEL, cell)
        known = {"role": "twin", "twin": twin, "reference": folder / "reference"} if twin else {}
        out = folder / (f"twin-{twin}" if twin else "reference")
        _train(planned(out=out, num_steps=NUM_STEPS).model_copy(update=known), candidate)


def _train(plan: Plan, candidate: Candidate, restore: Any = lambda: None) -> None:
    session = attached(candidate, plan)
    restore()
    for _ in range(plan.num_steps):
        candidate.step(session)
        candidate.optimizer.zero_grad()
        for group in candidate.optimizer.param_groups:
            group["lr"] *= DECAY
    session.close()


def _save(folder: Path) -> None:
    """On every rank of the first launch."""
    torch.manual_seed(0)
    candidate = LAYOUTS[FIRST.layout](MODEL, FIRST)

    def keep_initial() -> None:
        save({"model": get_state_dict(candidate.chunks[0], ())[0]}, checkpoint_id=folder / "initial")

    plan = planned(out=folder / "before", role="candidate", reference=folder / "reference", num_steps=NUM_STEPS - 1)
    _train(plan, candidate, keep_initial)
    model, optimizer = get_state_dict(candidate.chunks[0], candidate.optimizer)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "saved")


def _resume_all(runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    """On every rank of the second launch: train on from the checkpoint, once for each run, and judge."""
    traced, took = [], []
    for run in runs:
        begin = time.monotonic()
        traced.append(Traced(folder, folder / str(run)))
        _resume(run, folder)
        took.append(time.monotonic() - begin)
    return [
        replace(one, seconds=one.seconds + seconds)
        for one, seconds in zip(shared_out(traced, judge), took, strict=True)
    ]


def _resume(run: Sided, folder: Path) -> None:
    torch.manual_seed(1)  # a new process begins otherwise
    second = cast(Resumed, run.case).second
    candidate = LAYOUTS[second.layout](MODEL, second)

    def restore() -> None:
        model, optimizer = get_state_dict(candidate.chunks[0], candidate.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "saved")
        tensors = cast(Mapping[str, torch.Tensor], model)
        initial = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items()}
        load({"model": initial}, checkpoint_id=folder / "initial")
        loaded = Loaded(candidate, model, optimizer, initial)
        with torch.no_grad():
            patched(run.patch, loaded)
        set_state_dict(
            candidate.chunks[0],
            candidate.optimizer,
            model_state_dict=loaded.model,
            optim_state_dict=cast(Any, loaded.optimizer),
        )

    plan = planned(out=folder / str(run), role="candidate", reference=folder / "reference")
    plan = plan.model_copy(update={"first_step": NUM_STEPS - 1, "parameters": "own"})
    _train(plan, candidate, restore)


def shard_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the rows of a whole tensor that this rank has of a distributed one."""
    return distribute_tensor(whole, like.device_mesh, like.placements).to_local()
