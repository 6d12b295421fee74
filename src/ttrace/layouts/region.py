"""Regions: the parts of a logical tensor that ranks hold.

A region is an ordered list of ranges for each dim. A flat shard, as sharded optimizers have, is a list of ranges of the
flattened box. `region.take(full)` slices, `region.put(local, full)` joins. `measure_coverage` counts the elements that
no region holds, or that several hold, without reading data. Nothing here depends on tensor, context or expert
parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ttrace.layouts import ranges as rg
from ttrace.layouts.ranges import Ranges

Shape = tuple[int, ...]
_MANY_RUNS = 64
"""With more runs, elements are gathered by index instead of run by run."""


@dataclass(frozen=True)
class Region:
    """The global indices that a local tensor holds.

    `dims` has one list of ranges per dim of `shape`, the shape of the logical tensor. With `flat`, the local tensor
    is one-dimensional and holds these ranges of the flattened box that `dims` describes.
    """

    shape: Shape
    dims: tuple[Ranges, ...]
    flat: Ranges | None = None

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        return cls(shape, tuple(rg.whole(size) for size in shape))

    @classmethod
    def flat_of(cls, shape: Shape, flat: Ranges) -> Region:
        """Make a region of ranges of the flattened logical tensor."""
        return cls(shape, cls.whole(shape).dims, rg.merge(flat))

    @cached_property
    def box_shape(self) -> Shape:
        return tuple(rg.length(ranges) for ranges in self.dims)

    @cached_property
    def local_shape(self) -> Shape:
        return self.box_shape if self.flat is None else (rg.length(self.flat),)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @cached_property
    def is_whole(self) -> bool:
        return self == Region.whole(self.shape)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Only integers: the cached hash is pickled, and hashes of strings differ between processes.
        return hash((self.shape, self.dims, self.flat or ()))

    def __str__(self) -> str:
        if self.is_whole:
            return "whole"
        box = ", ".join(_format_ranges(ranges) for ranges in self.dims)
        return f"[{box}]" if self.flat is None else f"[{box}] flat {_format_ranges(self.flat)}"

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this region's part of the logical tensor: a view if the region is one box."""
        box = full
        for dim, ranges in enumerate(self.dims):
            box = _pick(box, dim, ranges)
        return box if self.flat is None else _pick(box.reshape(-1), 0, self.flat)

    def put(self, local: torch.Tensor, full: torch.Tensor) -> None:
        """Write this region's part into the logical tensor."""
        for ours, theirs in self.overlaps(Region.whole(self.shape)):
            theirs.assign(full, ours.of(local))

    def within(self, outer: Region) -> Region:
        """Translate this region of `outer`'s local tensor into one of its logical tensor; neither may be flat."""
        assert self.flat is outer.flat is None
        assert self.shape == outer.local_shape
        return Region(outer.shape, tuple(rg.select(a, b) for a, b in zip(outer.dims, self.dims, strict=True)))

    def overlaps(self, other: Region) -> Sequence[tuple[BoxPart, BoxPart]]:
        """Return the elements that both hold, as pairs of parts of the two local tensors that have the same shape."""
        return _overlaps(self, other)

    def boxes(self) -> list[Box]:
        """Return this region as boxes of the logical tensor: one, or several for a flat shard."""
        if self.flat is None:
            return [Box(self.dims, None, self.box_shape)]
        boxes, at = [], 0
        for start, stop in self.flat:
            for corner, extent in _cut_run(start, stop, self.box_shape):
                dims = tuple(
                    rg.select(ranges, ((first, first + size),))
                    for ranges, first, size in zip(self.dims, corner, extent, strict=True)
                )
                boxes.append(Box(dims, at, extent))
                at += math.prod(extent)
        return boxes

    def look_up(self, at: torch.Tensor) -> torch.Tensor:
        """Look up the row-major global indices of some local elements, given by their row-major positions."""
        inside = at if self.flat is None else rg.look_up(self.flat, at)
        places = zip(self.dims, _unravel(inside, self.box_shape), strict=True)
        return torch.zeros_like(at).add_(ravel_index([rg.look_up(*place) for place in places], self.shape))

    def find_index(self, local: Sequence[int]) -> Shape:
        """Return the index in the logical tensor of one local element."""
        at = ravel_index(local, self.local_shape)
        whole = self.look_up(torch.tensor([at], dtype=torch.int64, device="cpu"))
        return tuple(int(number) for number in _unravel(whole, self.shape))

    def find_positions(self, index: torch.Tensor) -> torch.Tensor:
        """Find the row-major positions of elements, given by their row-major global indices; -1 if not held."""
        places = zip(self.dims, _unravel(index, self.shape), strict=True)
        positions = [rg.find_positions(*place) for place in places]
        at = torch.zeros_like(index) + ravel_index(positions, self.box_shape)
        for position in positions:
            at = at.masked_fill(position < 0, -1)
        return at if self.flat is None else rg.find_positions(self.flat, at)

    def linear(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row-major global indices of the local elements, as `rows[:, None] + columns`."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        if self.flat is not None:
            rows, columns = Region(self.shape, self.dims).linear(device)
            index = rg.indices(self.flat, device)
            width = max(columns.numel(), 1)
            return zero, rows[torch.div(index, width, rounding_mode="floor")] + columns[index % width]
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        columns = zero
        dims = list(zip(self.dims, strides, strict=True))
        # Trailing dims become columns until a row is long enough to amortize an operation per row.
        while dims and columns.numel() < 4096:
            ranges, stride = dims.pop()
            columns = ((rg.indices(ranges, device) * stride)[:, None] + columns).reshape(-1)
        rows = zero
        for ranges, stride in dims:
            rows = (rows[:, None] + rg.indices(ranges, device) * stride).reshape(-1)
        return rows, columns


@dataclass(frozen=True)
class BoxPart:
    """A part of a local tensor: slices or indices into one of its boxes."""

    box: Box
    cut: tuple[slice | torch.Tensor, ...]

    @property
    def is_in_order(self) -> bool:
        """Whether its elements are in the order of the local tensor."""
        return self.box.offset is None and all(isinstance(cut, slice) for cut in self.cut)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        box = self._box(local)
        return box[self.cut] if self.cut else box

    def assign(self, local: torch.Tensor, values: torch.Tensor) -> None:
        self._box(local)[self.cut if self.cut else ...] = values

    def _box(self, local: torch.Tensor) -> torch.Tensor:
        if self.box.offset is None:
            return local
        start, shape = self.box.offset, self.box.shape
        return local.view(-1)[start : start + math.prod(shape)].view(shape)

    def find_region(self, shape: Shape, bounds: Sequence[tuple[int, int]]) -> Region:
        """Return some of this part, given by one range per dim, as a region of the logical tensor."""
        dims = []
        for ranges, cut, (start, stop) in zip(self.box.dims, self.cut, bounds, strict=True):
            if isinstance(cut, slice):
                dims.append(rg.select(ranges, ((cut.start + start, cut.start + stop),)))
            else:
                dims.append(rg.from_indices(rg.look_up(ranges, cut.flatten()[start:stop])))
        return Region(shape, tuple(dims))

    def global_index(self, index: Shape) -> Shape:
        """Return the index in the logical tensor of the element at this index of the part."""
        result = []
        for ranges, cut, i in zip(self.box.dims, self.cut, index, strict=True):
            at = cut.start + i if isinstance(cut, slice) else int(cut.flatten()[i])
            result.append(rg.select(ranges, ((at, at + 1),))[0][0])
        return tuple(result)


@dataclass(frozen=True)
class Box:
    """A box of the logical tensor, and its offset in the flattened local tensor; None if it is that whole tensor."""

    dims: tuple[Ranges, ...]
    offset: int | None
    shape: Shape


@lru_cache(maxsize=64)  # a model uses few different layouts
def _overlaps(one: Region, other: Region) -> Sequence[tuple[BoxPart, BoxPart]]:
    overlaps: list[tuple[BoxPart, BoxPart]] = []
    for a, b in itertools.product(one.boxes(), other.boxes()):
        if max((len(ranges) for box in (a, b) for ranges in box.dims), default=0) > _MANY_RUNS:
            overlaps += _gather_parts(a, b)
            continue
        runs = [rg.intersect(x, y) for x, y in zip(a.dims, b.dims, strict=True)]
        if all(runs):
            overlaps += _pair_parts(a, b, runs)
    return tuple(overlaps)


def _pair_parts(a: Box, b: Box, runs: list[list[tuple[int, int, int]]]) -> Iterator[tuple[BoxPart, BoxPart]]:
    if math.prod(len(dim) for dim in runs) > _MANY_RUNS:
        yield from _gather_parts(a, b)
        return
    for combination in itertools.product(*runs):
        yield (
            BoxPart(a, tuple(slice(at, at + n) for at, _, n in combination)),
            BoxPart(b, tuple(slice(at, at + n) for _, at, n in combination)),
        )


def _gather_parts(a: Box, b: Box) -> Iterator[tuple[BoxPart, BoxPart]]:
    """Pair all common elements at once, by index: dispatched tokens have one run for each token."""
    shared = [rg.intersect_positions(x, y) for x, y in zip(a.dims, b.dims, strict=True)]
    if all(at.numel() for at, _ in shared):
        yield _make_gathered(a, [at for at, _ in shared]), _make_gathered(b, [bt for _, bt in shared])


def _make_gathered(box: Box, positions: list[torch.Tensor]) -> BoxPart:
    num_dims = len(positions)
    grid = (index.view(*(-1 if d == dim else 1 for d in range(num_dims))) for dim, index in enumerate(positions))
    return BoxPart(box, tuple(grid))


def ravel_index(index: Sequence[Any], shape: Shape) -> Any:
    """Return the row-major position of an index, given as integers or as tensors of integers."""
    at: Any = 0
    for number, size in zip(index, shape, strict=True):
        at = at * size + number
    return at


def _unravel(index: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    result = []
    for size in reversed(shape):
        result.append(index % size)
        index = torch.div(index, size, rounding_mode="floor")
    return result[::-1]


def _format_ranges(ranges: Ranges) -> str:
    shown = "+".join(f"{start}:{stop}" for start, stop in ranges[:3])
    return f"{shown}+..." if len(ranges) > 3 else shown or "none"


def _pick(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor if (start, stop) == (0, tensor.shape[dim]) else tensor.narrow(dim, start, stop - start)
    if not ranges:
        return tensor.narrow(dim, 0, 0)
    return tensor.index_select(dim, rg.indices(ranges).to(tensor.device))


def _cut_run(start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Cut one run of a flattened box into boxes (corner, extent), in order: at most two per dim, plus one."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for corner, extent in _cut_run(start - first * row, stop - first * row, shape[1:]):
            yield (first, *corner), (1, *extent)
        return
    if start % row:
        yield from _cut_run(start, (first + 1) * row, shape)
        first += 1
    full_rows = stop // row - first
    if full_rows:
        yield (first, *(0 for _ in shape[1:])), (full_rows, *shape[1:])
    if stop % row:
        yield from _cut_run(stop // row * row, stop, shape)


@dataclass(frozen=True)
class Coverage:
    """How many elements no region holds, and how many several different regions hold; replicas count as one region."""

    num_gap: int
    num_overlap: int
    first_gap: tuple[int, ...] | None = None
    first_overlap: tuple[int, ...] | None = None

    @property
    def is_tiling(self) -> bool:
        return self.num_gap == 0 and self.num_overlap == 0


TILING = Coverage(0, 0)
_MANY_COUNTED_RUNS = 4096
"""A box with more runs is counted as a whole, instead of run by run."""


def measure_coverage(regions: Iterable[Region]) -> Coverage:
    """Measure how the distinct regions among these cover their logical tensor."""
    distinct = list(dict.fromkeys(regions))
    if not distinct:
        raise ValueError("there are no regions")
    if len(distinct) == 1 and distinct[0].is_whole:
        return TILING
    return _count(tuple(distinct))


@lru_cache(maxsize=256)  # a model uses few different layouts
def _count(distinct: tuple[Region, ...]) -> Coverage:
    """Count the holders of each cell of the grid that the borders of all ranges form."""
    shape = distinct[0].shape
    boxes = [box.dims for region in distinct for box in region.boxes()]
    borders = [sorted({0, size}) for size in shape]
    for dim, size in enumerate(shape):
        marks = {mark for dims in boxes for bounds in dims[dim] for mark in bounds}
        borders[dim] = sorted(marks | {0, size})
    cells = [{mark: i for i, mark in enumerate(marks)} for marks in borders]
    few = [dims for dims in boxes if math.prod(map(len, dims)) <= _MANY_COUNTED_RUNS]
    holders = _count_runs([run for dims in few for run in itertools.product(*dims)], cells)
    for dims in boxes:
        if math.prod(map(len, dims)) > _MANY_COUNTED_RUNS:
            _add_box(holders, dims, cells)
    return _summarize(holders, borders)


def _count_runs(runs: list[tuple[tuple[int, int], ...]], cells: list[dict[int, int]]) -> torch.Tensor:
    """Count the boxes that hold each cell, as prefix sums over marked corners; a box has one range per dim."""
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
