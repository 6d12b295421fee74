"""The notation of layouts, and the regions that a layout describes.

    "seq/cp:zigzag/tp batch/dp hidden +ep"      dim[/axis[:split]]...  +axis

After each dim follow the axes that cut it, outermost first. `+axis` means that the shards along that axis still have
to be added up (a pending sum). Along axes that are not named, the tensor is replicated. `...` stands for any number of
dims that are not cut.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import TILING, Coverage, Region, Shape, measure_coverage
from ttrace.layouts.splits import BLOCK, Split

_DIM = re.compile(r"(?P<name>[A-Za-z_]\w*|\.\.\.)(?P<cuts>(?:/[^/\s]+)*)")
_CUT = re.compile(r"(?P<axis>[A-Za-z_]\w*)(?::(?P<split>.+))?")


@dataclass(frozen=True)
class Cut:
    """One axis that cuts a dim, and its split."""

    axis: str
    split: Split = BLOCK

    def __str__(self) -> str:
        return self.axis if self.split == BLOCK else f"{self.axis}:{self.split}"


@dataclass(frozen=True)
class Dim:
    """A dim by name, with the axes that cut it, outermost first."""

    name: str
    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        return "/".join([self.name, *map(str, self.cuts)])


@dataclass(frozen=True)
class Layout:
    """Per dim, the axes that cut it, outermost first; plus the axes with a pending sum."""

    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        axes = [cut.axis for dim in self.dims for cut in dim.cuts] + list(self.pending)
        for axis in axes:
            if axes.count(axis) > 1:
                raise LayoutError(
                    f"layout {str(self)!r} names axis {axis} twice; an axis either cuts one dim or is summed over."
                )
        for dim in self.dims:
            if len(dim.cuts) > 1 and any(cut.split.name == "padded" for cut in dim.cuts):
                raise LayoutError(f"layout {str(self)!r}: a padded dim is cut by one axis only.")
        if [dim.name for dim in self.dims].count("...") > 1 or any(d.name == "..." and d.cuts for d in self.dims):
            raise LayoutError(f"layout {str(self)!r}: '...' may be used once, and cannot be cut.")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse the notation, for example `batch/dp hidden/tp +cp`."""
        return _parse(text)

    def __str__(self) -> str:
        return " ".join([*map(str, self.dims), *(f"+{axis}" for axis in self.pending)])

    @cached_property
    def axes(self) -> frozenset[str]:
        return frozenset(cut.axis for dim in self.dims for cut in dim.cuts) | frozenset(self.pending)

    def without_pending(self) -> Layout:
        return Layout(self.dims)

    def of_rank(self, num_dims: int) -> Layout:
        """Return this layout with `...` written out for a tensor with `num_dims` dims."""
        names = [dim.name for dim in self.dims]
        if "..." in names:
            at = names.index("...")
            missing = num_dims - len(names) + 1
            filled = tuple(Dim(f"any{i}") for i in range(missing))
            if missing >= 0:
                return Layout(self.dims[:at] + filled + self.dims[at + 1 :], self.pending)
        if len(names) != num_dims:
            raise LayoutError(
                f"layout {str(self)!r} has {len(names)} dims, the tensor has {num_dims}. "
                "Name every dim, or write '...'."
            )
        return self

    def region(self, shape: Shape, sizes: Mapping[str, int], coord: Mapping[str, int]) -> Region:
        """Return what the rank at `coord` holds of a logical tensor of this shape; axes outside `sizes` have size 1."""
        layout = self.of_rank(len(shape))
        dims = (
            _find_dim_ranges(dim.cuts, size, *_find_places(dim, sizes, coord))
            for dim, size in zip(layout.dims, shape, strict=True)
        )
        return Region(shape, tuple(dims))

    def local_shape(self, shape: Shape, sizes: Mapping[str, int], coord: Mapping[str, int]) -> Shape:
        """Return the shape of the local tensor, padding included."""
        layout = self.of_rank(len(shape))
        result = []
        for dim, size in zip(layout.dims, shape, strict=True):
            indices, worlds = _find_places(dim, sizes, coord)
            for cut, index, world in zip(dim.cuts, indices, worlds, strict=True):
                size = cut.split.local_size(size, index, world)
            result.append(size)
        return tuple(result)

    def global_shape(self, local_shape: Shape, sizes: Mapping[str, int]) -> Shape:
        """Return the logical shape if every cut is even, for tensors whose logical shape is otherwise unknown."""
        layout = self.of_rank(len(local_shape))
        return tuple(
            size * math.prod(sizes.get(cut.axis, 1) for cut in dim.cuts)
            for dim, size in zip(layout.dims, local_shape, strict=True)
        )

    def coverage(self, shape: Shape, sizes: Mapping[str, int]) -> Coverage:
        """Measure how the regions of all ranks cover the tensor; dim by dim, so many ranks cost no more than few."""
        layout = self.of_rank(len(shape))
        per_dim = [
            _measure_dim_coverage(dim.cuts, size, tuple(sizes.get(cut.axis, 1) for cut in dim.cuts))
            for dim, size in zip(layout.dims, shape, strict=True)
        ]
        if all(dim.is_tiling for dim in per_dim):
            return TILING
        first_held = tuple(
            _find_first_held(dim.cuts, size, tuple(sizes.get(cut.axis, 1) for cut in dim.cuts))
            for dim, size in zip(layout.dims, shape, strict=True)
        )
        return _combine_coverage(per_dim, shape, first_held)


@cache
def _parse(text: str) -> Layout:
    dims: list[Dim] = []
    pending: list[str] = []
    for word in text.split():
        if word.startswith("+"):
            pending.append(_parse_pending(text, word))
            continue
        match = _DIM.fullmatch(word)
        if match is None:
            raise LayoutError(f"layout {text!r}: {word!r} is not dim[/axis[:split]]..., for instance seq/cp:zigzag/tp.")
        dims.append(Dim(match["name"], tuple(_parse_cut(text, part) for part in match["cuts"].split("/")[1:])))
    return Layout(tuple(dims), tuple(pending))


def _parse_pending(text: str, word: str) -> str:
    if not word[1:].isidentifier():
        raise LayoutError(f"layout {text!r}: {word!r} is not +axis, for instance +tp.")
    return word[1:]


def _parse_cut(text: str, part: str) -> Cut:
    match = _CUT.fullmatch(part)
    if match is None:
        raise LayoutError(f"layout {text!r}: {part!r} is not axis[:split], for instance cp:zigzag.")
    return Cut(match["axis"], Split.parse(match["split"]) if match["split"] else BLOCK)


def _find_places(
    dim: Dim, sizes: Mapping[str, int], coord: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    indices = tuple(coord.get(cut.axis, 0) for cut in dim.cuts)
    return indices, tuple(sizes.get(cut.axis, 1) for cut in dim.cuts)


@cache
def _find_dim_ranges(cuts: tuple[Cut, ...], size: int, indices: tuple[int, ...], worlds: tuple[int, ...]) -> Ranges:
    ranges = rg.whole(size)
    for cut, index, world in zip(cuts, indices, worlds, strict=True):
        ranges = rg.select(ranges, cut.split.ranges(rg.length(ranges), index, world))
    return ranges


@cache
def _measure_dim_coverage(cuts: tuple[Cut, ...], size: int, worlds: tuple[int, ...]) -> Coverage:
    regions = (
        Region((size,), (_find_dim_ranges(cuts, size, indices, worlds),))
        for indices in itertools.product(*map(range, worlds))
    )
    return measure_coverage(regions)


@cache
def _find_first_held(cuts: tuple[Cut, ...], size: int, worlds: tuple[int, ...]) -> int:
    places = itertools.product(*map(range, worlds))
    return min((start for at in places for start, _ in _find_dim_ranges(cuts, size, at, worlds)), default=0)


def _combine_coverage(per_dim: list[Coverage], shape: Shape, first_held: Shape) -> Coverage:
    """Combine the coverage of all dims: an element is held by the product of the numbers of holders of its indices."""
    total = math.prod(shape)
    held = math.prod(size - dim.num_gap for size, dim in zip(shape, per_dim, strict=True))
    once = math.prod(size - dim.num_gap - dim.num_overlap for size, dim in zip(shape, per_dim, strict=True))
    gap = _find_first([dim.first_gap for dim in per_dim], (0,) * len(shape)) if held < total else None
    overlap = _find_first([dim.first_overlap for dim in per_dim], first_held) if once < held else None
    return Coverage(total - held, held - once, gap, overlap)


def _find_first(per_dim: list[tuple[int, ...] | None], corner: Shape) -> tuple[int, ...] | None:
    """Find the first element with a marked index in one dim; its other indices are those of `corner`."""
    marked = [(*corner[:dim], *index, *corner[dim + 1 :]) for dim, index in enumerate(per_dim) if index]
    return min(marked, default=None)
