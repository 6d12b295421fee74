"""Evidence of a disagreement: the tensors of two ranks that should have the same, and how they differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ttrace.monitor.disagreement import Disagreement
from ttrace.monitor.exchange import gather_objects

_MOST_BYTES = 16 << 20
"""Larger tensors are kept as files, but not sent to other ranks."""


def choose_pair(found: Disagreement) -> tuple[int, int]:
    """Choose a rank that is wrong and one that agrees with the majority, or two that differ."""
    return (found.ranks[0], found.majority[0]) if found.majority else (found.ranks[0], found.ranks[-1])


def describe_difference(found: Disagreement, tensor: torch.Tensor | None, rank: int) -> Disagreement:
    """Say how many elements of the two ranks differ, and the first one. All ranks call this together."""
    pair = choose_pair(found)
    is_sent = rank in pair and tensor is not None and tensor.nbytes <= _MOST_BYTES
    everyones = gather_objects(tensor.detach().cpu() if is_sent and tensor is not None else None)
    wrong, right = everyones[pair[0]], everyones[pair[1]]
    if wrong is None or right is None or wrong.shape != right.shape:
        return found
    ours, theirs = (each.contiguous().reshape(-1) for each in (right, wrong))
    size = ours.element_size()
    apart = (ours.view(torch.uint8).view(-1, size) != theirs.view(torch.uint8).view(-1, size)).any(1)
    first = apart.nonzero()[0, 0]
    index = list(map(int, torch.unravel_index(first, right.shape))) if right.ndim else []
    values = f"{_show(theirs[first])} on rank {pair[0]}, {_show(ours[first])} on rank {pair[1]}"
    return replace(found, detail=f"{int(apart.sum())} of {len(apart)} elements differ, first at {index}: {values}")


def _show(value: torch.Tensor) -> str:
    return f"{value.item():.9g}" if value.is_floating_point() else str(value.item())


def keep_evidence(found: Disagreement, tensor: torch.Tensor | None, rank: int, out: Path) -> Disagreement:
    """Keep the tensors of the two ranks as files, if they can be written; each rank writes its own."""
    folder = out / f"step-{found.step}"
    name = found.site.replace("/", "+")
    paths = {each: folder / f"{name}-rank{each}.pt" for each in choose_pair(found)}
    if rank in paths and tensor is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(tensor.detach().cpu().clone(), paths[rank])
        except (OSError, RuntimeError) as error:  # torch raises the latter on a full disk
            detail = f"{found.detail}; {paths[rank]} could not be written: {error}"
            return replace(found, detail=detail)
    return replace(found, evidence=tuple(paths.values()))
