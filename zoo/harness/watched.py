"""The case of entries about drift: a small training that `ttrace.watch` watches, with no reference.

A patch changes the training once it is watched: it may replace where batches come from, and what is done before a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ttrace
from ttrace.judge.verdict import Exit
from ttrace.monitor.disagreement import Disagreement
from zoo.bug import Judge, Launcher
from zoo.harness.breaking import SHAPE
from zoo.harness.candidate import Cell
from zoo.harness.cells import LAYOUTS
from zoo.harness.ranks import on_ranks
from zoo.harness.transformer import Shape
from zoo.launch import TIMEOUT, Sided, patched
from zoo.seen import Seen

NUM_STEPS, EVERY = 12, 2
MODEL = replace(SHAPE, tied=False)
RULES = {"*norm.weight": "..."}
"""What tensor parallelism leaves whole says so."""


class WatchedTraining:
    """A training on this rank. Its methods may be replaced."""

    def __init__(self, cell: Cell, shape: Shape = MODEL) -> None:
        torch.manual_seed(0)
        candidate = LAYOUTS[cell.layout](shape, cell)
        self.model: nn.Module = candidate.chunks[0]
        self.optimizer = candidate.optimizer
        self.shape = shape
        self.num_data_ranks = candidate.num_data_ranks
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.read_batch: Callable[[int], torch.Tensor] = self.read_own_batch
        self.before_step: Callable[[int], None] = lambda _: None
        """Called with gradients that are final, before the optimizer steps."""

    def read_own_batch(self, step: int) -> torch.Tensor:
        """Read this rank's tokens of a step, and the one after each."""
        where = self.rank if self.num_data_ranks > 1 else 0
        drawn = torch.Generator().manual_seed(1000 * step + where)
        return torch.randint(self.shape.vocab, (2, self.shape.length + 1), generator=drawn)

    def train(self, step: int) -> None:
        words = self.read_batch(step)
        logits = self.model(words[:, :-1]).float()
        F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()
        self.before_step(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find_parameter(self, name: str) -> torch.Tensor:
        """Return this rank's memory of a parameter."""
        [found] = [value for each, value in self.model.named_parameters() if each.removeprefix("module.") == name]
        local = found.detach()
        return local.to_local() if hasattr(local, "to_local") else local


@dataclass(frozen=True)
class Watched:
    """The layout of a training that is watched."""

    cell: Cell = Cell("ddp", 2)  # noqa: RUF009  # cells are immutable

    @property
    def num_ranks(self) -> int:
        return self.cell.num_ranks

    @property
    def launcher(self) -> Launcher:
        return on_watched


def on_watched(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:  # noqa: ARG001
    """The launcher of watched trainings: there is no trace to judge."""
    timeout = TIMEOUT * (5 + len(runs))
    kept: list[Seen] = on_ranks(num_ranks, _train_all, runs, folder, timeout=timeout)[0]
    return kept


def _train_all(runs: Sequence[Sided], folder: Path) -> list[Seen]:
    return [_train(run, folder / str(run)) for run in runs]


def _train(run: Sided, out: Path) -> Seen:
    begin = time.monotonic()
    training = WatchedTraining(cast(Watched, run.case).cell)
    rules = RULES if training.num_data_ranks == 1 else None
    told: list[Disagreement] = []
    monitor = ttrace.watch(
        training.model, training.optimizer, every=EVERY, rules=rules, out=out, on_disagreement=told.append
    )
    with patched(run.patch, training):
        for step in range(NUM_STEPS):
            training.train(step)
    monitor.close()
    return replace(_describe(told), seconds=time.monotonic() - begin)


def _describe(found: Sequence[Disagreement]) -> Seen:
    """Describe what was found as an entry expects it: the tensor's name, its kind, and the trouble as the cause."""
    if not found:
        return Seen(Exit.PASSED)
    first = found[0]
    name, _, kind = first.site.partition("/")
    module = name.rpartition(".")[0] if kind else "."
    return Seen(
        Exit.FOUND,
        module,
        kind.partition(".")[0] or first.site,
        first.trouble.value,
        first.axis or None,
        str(first),
        num_wrong=len(found),
    )
