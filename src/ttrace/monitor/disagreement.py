"""Disagreements between ranks: what they are, in which step and on which ranks, and the tensors that show them.

`DataWatch` collects the fingerprints of the data that enter the model, which are compared like tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ttrace.capture.observe.hooks import flatten_with_paths
from ttrace.monitor.exchange import gather_objects
from ttrace.monitor.replicas import make_fingerprint, read_fingerprints


class Trouble(Enum):
    """The kinds of disagreements. The values are shown in notebooks."""

    REPLICAS_DIFFER = "replicas differ"
    SAME_DATA = "same data"
    OTHER_DATA = "other data"
    REPEATED_DATA = "repeated data"
    FROZEN = "frozen"
    STEP_COUNT = "step count"
    RANDOM_STATE = "random state"


@dataclass(frozen=True)
class Disagreement:
    """One thing that differs between ranks, or is wrong on a rank. All ranks have the same list of disagreements."""

    trouble: Trouble
    step: int
    site: str
    """The tensor, such as `layers.0.weight/param`, or another thing that is compared, such as `data`."""
    ranks: tuple[int, ...]
    """The ranks that are wrong: those that differ from the majority, or all ranks if there is no majority."""
    majority: tuple[int, ...] = ()
    """The ranks that agree with each other; empty if no value has a majority."""
    axis: str = ""
    """The axis of the mesh along which they must agree."""
    detail: str = ""
    evidence: tuple[Path, ...] = ()
    """Files with the tensor of one wrong rank and of one rank that agrees with the majority."""

    def __str__(self) -> str:
        where = _name_ranks(self.ranks)
        if self.trouble is Trouble.REPLICAS_DIFFER:
            others = f"{_name_ranks(self.majority)} agree" if self.majority else "no value has a majority"
            sentence = f"{self.site} differs on {where} along {self.axis}, where all must be equal; {others}"
        elif self.trouble is Trouble.SAME_DATA:
            sentence = f"{where} train on the same data along {self.axis}: each must have samples of its own"
        elif self.trouble is Trouble.OTHER_DATA:
            sentence = f"{where} train on different data along {self.axis}, where all must have the same"
        elif self.trouble is Trouble.RANDOM_STATE:
            sentence = f"{where} drew different random numbers along {self.axis}, where all must draw the same"
        elif self.trouble is Trouble.STEP_COUNT:
            sentence = f"the optimizer of {where} has taken a different number of steps"
        elif self.trouble is Trouble.REPEATED_DATA:
            sentence = f"{where} trained twice in a row on the same data"
        else:
            sentence = f"{self.site} does not change on {where}, though it is trained"
        detail = f" ({self.detail})" if self.detail else ""
        files = f"; see {self.evidence[0].parent}" if self.evidence else ""
        return f"step {self.step}: {sentence}{detail}{files}"


OnDisagreement = Callable[[Disagreement], object]
"""A function that is called with each new disagreement."""

_MOST_BYTES = 16 << 20
"""Larger tensors are written to files, but not sent to other ranks."""


def describe_difference(disagreement: Disagreement, tensor: torch.Tensor | None, rank: int) -> Disagreement:
    """Add how many elements of two ranks differ, and the first of them. All ranks must call this together."""
    pair = _choose_pair(disagreement)
    is_sent = rank in pair and tensor is not None and tensor.nbytes <= _MOST_BYTES
    everyones = gather_objects(tensor.detach().cpu() if is_sent and tensor is not None else None)
    wrong, right = everyones[pair[0]], everyones[pair[1]]
    if wrong is None or right is None or wrong.shape != right.shape:
        return disagreement
    ours, theirs = (each.contiguous().reshape(-1) for each in (right, wrong))
    size = ours.element_size()
    is_different = (ours.view(torch.uint8).view(-1, size) != theirs.view(torch.uint8).view(-1, size)).any(1)
    first = is_different.nonzero()[0, 0]
    index = list(map(int, torch.unravel_index(first, right.shape))) if right.ndim else []
    values = f"{_show(theirs[first])} on rank {pair[0]}, {_show(ours[first])} on rank {pair[1]}"
    detail = f"{int(is_different.sum())} of {len(is_different)} elements differ, first at {index}: {values}"
    return replace(disagreement, detail=detail)


def write_evidence(disagreement: Disagreement, tensor: torch.Tensor | None, rank: int, out: Path) -> Disagreement:
    """Write the tensors of two ranks to files, if possible. Each of the two ranks writes its own."""
    folder = out / f"step-{disagreement.step}"
    name = disagreement.site.replace("/", "+")
    paths = {each: folder / f"{name}-rank{each}.pt" for each in _choose_pair(disagreement)}
    if rank in paths and tensor is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(tensor.detach().cpu().clone(), paths[rank])
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
            detail = f"{disagreement.detail}; {paths[rank]} could not be written: {error}"
            return replace(disagreement, detail=detail)
    return replace(disagreement, evidence=tuple(paths.values()))


class DataWatch:
    """The fingerprints of the data that entered the model, by step, since they were last read."""

    def __init__(self) -> None:
        self._steps: dict[int, torch.Tensor] = {}
        self._last: tuple[int, int] | None = None

    def on_call(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the data of one call of the model: its integer tensors (tokens), or all tensors if there are none."""
        tensors = [leaf for _, leaf in flatten_with_paths((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        integers = [each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool]
        for tensor in integers or tensors:
            added = make_fingerprint(tensor)
            known = self._steps.get(step)
            self._steps[step] = added if known is None else known * 3 + added

    def read(self) -> tuple[int, list[int]]:
        """Return the fingerprint of the last step, and the steps that had the same data as the step before them."""
        steps, values = list(self._steps), read_fingerprints(self._steps.values())
        self._steps.clear()
        repeated = []
        for step, value in zip(steps, values, strict=True):
            if self._last == (step - 1, value):
                repeated.append(step)
            self._last = (step, value)
        return (self._last[1] if self._last is not None else 0), repeated


def _choose_pair(wrong: Disagreement) -> tuple[int, int]:
    """Choose a wrong rank and one that agrees with the majority, or the first and the last of the wrong ones."""
    return (wrong.ranks[0], wrong.majority[0]) if wrong.majority else (wrong.ranks[0], wrong.ranks[-1])


def _name_ranks(ranks: tuple[int, ...]) -> str:
    """Name the ranks, at most eight of them."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _show(value: torch.Tensor) -> str:
    return f"{value.item():.9g}" if value.is_floating_point() else str(value.item())
