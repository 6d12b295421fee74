"""Ordered lists of index ranges: the indices of one dim that a rank holds, in its own order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

import torch

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges in the order of the local tensor. Adjacent ranges are merged, and no range is empty."""
_FEW = 16
"""Up to this number, the indices of ranges are computed on the device instead of copied to it."""


def whole(size: int) -> Ranges:
    return ((0, size),) if size else ()


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Drop empty ranges and merge adjacent ones; the indices and their order stay the same."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start >= stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def select(outer: Ranges, inner: Ranges) -> Ranges:
    """Select the part of `outer` at the positions `inner`, which are relative to `outer`."""
    if len(outer) == 1:
        base = outer[0][0]
        return merge((base + start, base + stop) for start, stop in inner)
    offsets = _compute_offsets(outer)
    pieces: list[tuple[int, int]] = []
    for start, stop in inner:
        i = bisect_right(offsets, start) - 1
        while start < stop:
            take = min(stop, offsets[i + 1]) - start
            first = outer[i][0] + start - offsets[i]
            pieces.append((first, first + take))
            start += take
            i += 1
    return merge(pieces)


def intersect(a: Ranges, b: Ranges) -> list[tuple[int, int, int]]:
    """Find the runs that both contain, as (position in a, position in b, length), sorted by index."""
    runs = []
    left, right = _sort_positions(a), _sort_positions(b)
    i = j = 0
    while i < len(left) and j < len(right):
        (a0, a1, at), (b0, b1, bt) = left[i], right[j]
        start, stop = max(a0, b0), min(a1, b1)
        if start < stop:
            runs.append((at + start - a0, bt + start - b0, stop - start))
        if a1 <= b1:
            i += 1
        else:
            j += 1
    return runs


def intersect_positions(a: Ranges, b: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the positions in a and in b of the indices that both contain, sorted by index; fast for many ranges."""
    left, at = indices(a).sort()
    right, bt = indices(b).sort()
    if not right.numel():
        return at[:0], bt
    nearest = torch.searchsorted(right, left).clamp_max(right.numel() - 1)
    shared = right[nearest] == left
    return at[shared], bt[nearest[shared]]


def positions(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Return each range as (start, stop, position of its first index in the local tensor)."""
    return ((start, stop, at) for (start, stop), at in zip(ranges, _compute_offsets(ranges), strict=False))


def indices(ranges: Ranges, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return all indices in order, as int64."""
    if len(ranges) == 1:
        return torch.arange(*ranges[0], device=device)
    if torch.device(device).type != "cpu":
        if 0 < len(ranges) <= _FEW:
            return torch.cat([torch.arange(*run, device=device) for run in ranges])
        return indices(ranges).to(device, non_blocking=True)
    starts, stops = torch.tensor(ranges, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    lengths = stops - starts
    # Each index is its position in the whole list plus a shift that is constant within its range.
    shifts = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum()), device="cpu") + shifts.repeat_interleave(lengths)


def look_up(ranges: Ranges, at: torch.Tensor) -> torch.Tensor:
    """Look up the indices at these positions."""
    starts, _, offsets = _tabulate(positions(ranges))
    number = torch.searchsorted(offsets, at, right=True) - 1
    return starts[number] + at - offsets[number]


def find_positions(ranges: Ranges, index: torch.Tensor) -> torch.Tensor:
    """Find the positions of these indices; -1 for indices that the ranges do not contain."""
    if not ranges:
        return torch.full_like(index, -1)
    starts, stops, offsets = _tabulate(_sort_positions(ranges))
    number = (torch.searchsorted(starts, index, right=True) - 1).clamp_min(0)
    is_held = (index >= starts[number]) & (index < stops[number])
    return torch.where(is_held, offsets[number] + index - starts[number], -1)


def from_indices(index: torch.Tensor) -> Ranges:
    """Return ranges with these indices, in this order."""
    if index.numel() == 0:
        return ()
    cuts = (torch.nonzero(index.diff() != 1).flatten() + 1).tolist()
    values = index.tolist()
    bounds = [0, *cuts, len(values)]
    return tuple((values[i], values[j - 1] + 1) for i, j in pairwise(bounds))


def _compute_offsets(ranges: Ranges) -> list[int]:
    return list(accumulate((stop - start for start, stop in ranges), initial=0))


def _tabulate(rows: Iterable[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Return the three columns, each contiguous."""
    return list(torch.tensor([*rows], dtype=torch.int64, device="cpu").view(-1, 3).T.contiguous())


def _sort_positions(ranges: Ranges) -> list[tuple[int, int, int]]:
    return sorted(positions(ranges))
