"""This module computes with ordered lists of index ranges: the indices of one dim that a rank holds, in its order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

import torch

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges in the order in which the local tensor holds them; neighbours are merged, none is empty."""


def whole(size: int) -> Ranges:
    return ((0, size),) if size else ()


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same indices in the same order, with empty ranges dropped and adjoining ones joined."""
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
    """The part of `outer` that `inner` picks, where `inner` counts positions within `outer`."""
    if len(outer) == 1:
        base = outer[0][0]
        return merge((base + start, base + stop) for start, stop in inner)
    offsets = _offsets(outer)
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
    """Runs that both hold, as (position in a, position in b, length), in the order of the indices."""
    runs = []
    left, right = _sorted_with_position(a), _sorted_with_position(b)
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
    """The positions in a and in b of the indices that both hold, in the order of the indices: for lists of many."""
    left, at = indices(a).sort()
    right, bt = indices(b).sort()
    if not right.numel():
        return at[:0], bt
    found = torch.searchsorted(right, left).clamp_max(right.numel() - 1)
    shared = right[found] == left
    return at[shared], bt[found[shared]]


def positions(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Each range as (start, stop, position of its first index in the local tensor)."""
    return ((start, stop, at) for (start, stop), at in zip(ranges, _offsets(ranges), strict=False))


def indices(ranges: Ranges) -> torch.Tensor:
    """All indices in order, as int64."""
    if len(ranges) == 1:
        return torch.arange(*ranges[0])
    starts, stops = torch.tensor(ranges, dtype=torch.int64).view(-1, 2).unbind(1)
    lengths = stops - starts
    # Each index is its place in the whole list, moved to where its range starts.
    moved = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + moved.repeat_interleave(lengths)


def from_indices(index: torch.Tensor) -> Ranges:
    """The ranges that list these indices in this order."""
    if index.numel() == 0:
        return ()
    cuts = (torch.nonzero(index.diff() != 1).flatten() + 1).tolist()
    values = index.tolist()
    bounds = [0, *cuts, len(values)]
    return tuple((values[i], values[j - 1] + 1) for i, j in pairwise(bounds))


def _offsets(ranges: Ranges) -> list[int]:
    return list(accumulate((stop - start for start, stop in ranges), initial=0))


def _sorted_with_position(ranges: Ranges) -> list[tuple[int, int, int]]:
    return sorted(positions(ranges))
