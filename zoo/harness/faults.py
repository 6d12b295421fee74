"""Faults that are put into one module of a candidate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zoo.harness.candidate import Candidate, Cell

Wrong = Callable[[Any], Any]
"""What a module's output becomes."""
ON_ALL_RANKS = ("unreduced", "unaveraged")


def faults_of(cell: Cell) -> dict[str, str]:
    """The faults that make sense for a cell, and the module each is put into; its own kind's come last."""
    has_experts = {"moe", "ep"} & set(cell.parts)
    found = {
        "scaled": "layers.1.feed_forward.experts" if has_experts else "layers.1.feed_forward.w2",
        "shifted": "layers.2.attention",
    }
    if cell.num_microbatches > 1:
        found["stale"] = "layers.1.ffn_norm"
    if "tp" in cell.parts:
        found["unreduced"] = "layers.2.attention.wo"
    if cell.layout.startswith(("cp", "ep")) and "fsdp" not in cell.parts:
        found["unaveraged"] = "layers.2.attention.wo"
    if "ep" in cell.parts:
        found["misrouted"] = "layers.2.feed_forward"
    return found


def inject(fault: str, name: str, candidate: Candidate) -> None:
    """Put a fault into a module: on the last rank that has it, or on all for a reduction that is left out.

    Rows that come back from their experts in another order are misrouted; gradients that are not averaged over ranks
    are unaveraged.
    """
    owners: list[bool] = [False] * dist.get_world_size()
    module = _find(candidate, name)
    dist.all_gather_object(owners, module is not None)
    last = max(rank for rank, owns in enumerate(owners) if owns)
    if module is None or (dist.get_rank() != last and fault not in ON_ALL_RANKS):
        return
    if fault == "unaveraged":
        for parameter in module.parameters():
            parameter.is_left_out = True  # type: ignore[attr-defined]  # a mark for zoo.harness.context.average
    elif fault == "misrouted":
        experts: Any = module
        experts.run = _then(experts.run, lambda rows: rows.roll(1, 0))
    else:
        module.forward = _then(module.forward, FAULTS[fault]())


def _find(candidate: Candidate, name: str) -> nn.Module | None:
    for chunk in candidate.chunks:
        for path, module in chunk.named_modules():
            if path.removeprefix("module.") == name:
                found: nn.Module = module
                return found
    return None


def _then(function: Callable[..., Any], wrong: Wrong) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrong(function(*args, **kwargs))


def _scaled() -> Wrong:
    return lambda out: out * 1.1


def _shifted() -> Wrong:
    return lambda out: torch.roll(out, 1, 1)


def _stale() -> Wrong:
    """From the second microbatch on, what the one before gave, also when it is recomputed."""
    kept: list[torch.Tensor] = []

    def wrong(out: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            kept.append(out.detach())
        return out if len(kept) == 1 else out + (kept[-2] - out.detach())

    return wrong


def _unreduced() -> Wrong:
    """A partial sum passed on as if it were the whole."""

    def wrong(out: Any) -> Any:
        local = out.to_local(grad_placements=out.placements)
        return DTensor.from_local(local, out.device_mesh, [Replicate()] * out.device_mesh.ndim, run_check=False)

    return wrong


FAULTS: dict[str, Callable[[], Wrong]] = {
    "scaled": _scaled,
    "shifted": _shifted,
    "stale": _stale,
    "unreduced": _unreduced,
}
