"""Coverage of a logical tensor by regions, from region algebra alone, without any data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ttrace.layouts.region import Region
from ttrace.tensors import ranges as rg


@dataclass(frozen=True)
class Coverage:
    """Elements that no region holds, and elements that different regions hold; exact replicas count once."""

    num_gap: int
    num_overlap: int
    first_gap: tuple[int, ...] | None = None
    first_overlap: tuple[int, ...] | None = None

    @property
    def is_tiling(self) -> bool:
        return self.num_gap == 0 and self.num_overlap == 0


TILING = Coverage(0, 0)
_MANY_RUNS = 4096
"""A box with more runs is counted as a whole, and not cut into its runs."""


def measure_coverage(regions: Iterable[Region]) -> Coverage:
    """Measure how the distinct regions among these cover their logical tensor."""
    distinct = list(dict.fromkeys(regions))
    if not distinct:
        raise ValueError("no region to cover anything with")
    if len(distinct) == 1 and distinct[0].is_whole:
        return TILING
    return _count(tuple(distinct))


@lru_cache(maxsize=256)  # most tensors of a model are cut in a few ways
def _count(distinct: tuple[Region, ...]) -> Coverage:
    """Count holders on the grid of cells that all range borders together cut the tensor into."""
    shape = distinct[0].shape
    boxes = [box.dims for region in distinct for box in region.boxes()]
    borders = [sorted({0, size}) for size in shape]
    for dim, size in enumerate(shape):
        marks = {mark for dims in boxes for bounds in dims[dim] for mark in bounds}
        borders[dim] = sorted(marks | {0, size})
    cells = [{mark: i for i, mark in enumerate(marks)} for marks in borders]
    few = [dims for dims in boxes if math.prod(map(len, dims)) <= _MANY_RUNS]
    holders = _count_runs([run for dims in few for run in itertools.product(*dims)], cells)
    for dims in boxes:
        if math.prod(map(len, dims)) > _MANY_RUNS:
            _add_box(holders, dims, cells)
    return _summarize(holders, borders)


def _count_runs(runs: list[tuple[tuple[int, int], ...]], cells: list[dict[int, int]]) -> torch.Tensor:
    """Count the boxes that hold each cell, for all boxes at once, by their corners; each has one range per dim."""
    counts = torch.zeros([len(marks) for marks in cells], dtype=torch.int32, device="cpu")
    if not cells:
        return counts + len(runs)
    ends = [
        [torch.tensor([marks[run[dim][end]] for run in runs], dtype=torch.int64, device="cpu") for end in (0, 1)]
        for dim, marks in enumerate(cells)
    ]
    for corner in itertools.product((0, 1), repeat=len(cells)):
        index = tuple(ends[dim][end] for dim, end in enumerate(corner))
        counts.index_put_(index, torch.tensor((-1) ** sum(corner), dtype=torch.int32, device="cpu"), accumulate=True)
    for dim in range(len(cells)):
        counts = counts.cumsum(dim, dtype=torch.int32).narrow(dim, 0, counts.shape[dim] - 1)
    return counts


def _add_box(holders: torch.Tensor, dims: tuple[tuple[tuple[int, int], ...], ...], cells: list[dict[int, int]]) -> None:
    index = []
    for dim, ranges in enumerate(dims):
        index.append(rg.indices(tuple((cells[dim][start], cells[dim][stop]) for start, stop in ranges)))
    if all(part.numel() for part in index):
        grid = tuple(part.view(*(-1 if d == dim else 1 for d in range(len(index)))) for dim, part in enumerate(index))
        holders[grid] += 1


def _summarize(holders: torch.Tensor, borders: list[list[int]]) -> Coverage:
    volume = torch.ones((), dtype=torch.int64, device="cpu")
    for marks in borders:
        volume = volume[..., None] * torch.tensor(marks, dtype=torch.int64, device="cpu").diff()
    gap, overlap = holders == 0, holders > 1
    return Coverage(
        int((volume * gap).sum()),
        int((volume * overlap).sum()),
        _find_first(gap, borders),
        _find_first(overlap, borders),
    )


def _find_first(mask: torch.Tensor, borders: list[list[int]]) -> tuple[int, ...] | None:
    if not bool(mask.any()):
        return None
    cell = int(mask.reshape(-1).to(torch.int8).argmax())
    corner = []
    for dim in range(mask.ndim):
        step = math.prod(mask.shape[dim + 1 :])
        corner.append(borders[dim][cell // step])
        cell %= step
    return tuple(corner)
