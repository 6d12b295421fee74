"""Divisions of a tensor over ranks in every form, and the checks of the three laws of regions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ttrace.layouts import ranges as rg
from ttrace.layouts.layout import Cut, Dim, Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.region import Region, Shape
from ttrace.layouts.splits import Split
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Permutation, Rows, generate_values

NAME = "0/-/layers.3.mlp.fc1.weight/param"
DISTRIBUTIONS: tuple[Distribution, ...] = (Normal(0.5, 2.0), Integers(-3, 1000), Rows(50), Mask(0.4), Permutation())
NESTED = ("block", "balanced", "zigzag", "striped", "striped(2)", "striped(3)")
OUTERMOST = ("fused(2)", "fused(3)", "fused(2,1,1)", "fused(4,1,1)")
ALONE = ("padded", "padded(3)")


def law(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Division:
    """A layout of one logical tensor on a mesh of some ranks."""

    shape: Shape
    layout: Layout
    mesh: Mesh

    @property
    def regions(self) -> list[Region]:
        return [self.layout.region(self.shape, self.mesh.sizes, coord) for coord in self.mesh.coords()]

    def padded(self, region: Region, local: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the local tensor as the rank holds it, with its padding."""
        shape = self.layout.local_shape(self.shape, self.mesh.sizes, self.mesh.coord(rank))
        held = torch.full(shape, -77, dtype=local.dtype)
        held[tuple(slice(0, size) for size in region.local_shape)] = local
        return held


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 3) -> Shape:
    """Draw a shape of up to three dims, often uneven, sometimes tiny or empty, sometimes divisible into fused parts."""
    num_dims = draw(st.integers(1, max_dims))
    largest = {1: 150, 2: 26, 3: 12}[num_dims]
    size = st.one_of(st.integers(0, largest), st.integers(1, 3), st.sampled_from((12, 12 * (largest // 12))))
    return tuple(draw(st.lists(size, min_size=num_dims, max_size=num_dims)))


@st.composite
def meshes(draw: st.DrawFn, max_ranks: int = 64) -> Mesh:
    first = draw(st.integers(1, max_ranks))
    second = draw(st.integers(1, max_ranks // first))
    third = draw(st.integers(1, max_ranks // first // second))
    return Mesh.of(a=first, b=second, c=third)


@st.composite
def divisions(draw: st.DrawFn, shape: Shape | None = None, max_ranks: int = 64) -> Division:
    """Draw a division over three axes, each of which cuts one dim (several may cut the same, in any order) or none."""
    shape = draw(shapes()) if shape is None else shape
    targets = draw(st.lists(st.integers(-1, len(shape) - 1), min_size=3, max_size=3))
    aims = list(zip(draw(st.permutations("abc")), targets, strict=True))
    dims = [
        Dim(f"d{dim}", draw(cuts(size, [axis for axis, target in aims if target == dim])))
        for dim, size in enumerate(shape)
    ]
    return Division(shape, Layout(tuple(dims)), draw(meshes(max_ranks)))


@st.composite
def cuts(draw: st.DrawFn, size: int, axes: Sequence[str]) -> tuple[Cut, ...]:
    result = []
    for depth, axis in enumerate(axes):
        words = list(NESTED)
        if depth == 0:
            words += [word for word in OUTERMOST if size % _num_parts(word) == 0]
        if len(axes) == 1:
            words += ALONE
        result.append(Cut(axis, Split.parse(draw(st.sampled_from(words)))))
    return tuple(result)


def _num_parts(word: str) -> int:
    args = Split.parse(word).args
    return args[0] if len(args) == 1 else sum(args)


@st.composite
def partitions(draw: st.DrawFn, regions: Sequence[Region]) -> list[Region]:
    """Flatten each box, cut it at random, and give the pieces to ranks: flat regions of several ranges."""
    result = []
    for box in regions:
        marks = draw(st.lists(st.integers(0, box.numel), max_size=6))
        bounds = sorted({0, box.numel, *marks})
        num_ranks = draw(st.integers(1, 4))
        dealt: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        for i, piece in enumerate(itertools.pairwise(bounds)):
            dealt[draw(st.integers(0, num_ranks - 1)) if i else 0].append(piece)
        result += [Region(box.shape, box.dims, rg.merge(pieces)) for pieces in dealt]
    return result


@st.composite
def flat_regions(draw: st.DrawFn, shape: Shape | None = None) -> list[Region]:
    """Draw a flat partition of the whole tensor, or of each box of a cut one."""
    shape = draw(shapes()) if shape is None else shape
    if draw(st.booleans()):
        return draw(partitions([Region.whole(shape)]))
    division = draw(divisions(shape, max_ranks=8))
    return draw(partitions(list(dict.fromkeys(division.regions))))


@st.composite
def index_lists(draw: st.DrawFn, shape: Shape | None = None) -> list[Region]:
    """Draw tokens that ranks hold in any order: a permutation of one dim, cut unevenly."""
    shape = draw(shapes()) if shape is None else shape
    dim = draw(st.integers(0, len(shape) - 1))
    order = torch.randperm(shape[dim], generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    marks = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=7)))
    whole = Region.whole(shape).dims
    return [
        Region(shape, (*whole[:dim], rg.from_indices(order[start:stop]), *whole[dim + 1 :]))
        for start, stop in itertools.pairwise((0, *marks, shape[dim]))
    ]


def any_regions(shape: Shape | None = None) -> st.SearchStrategy[list[Region]]:
    layouts = divisions(shape, max_ranks=12).map(lambda division: division.regions)
    return st.one_of(layouts, flat_regions(shape), index_lists(shape))


def check_generating(regions: Sequence[Region], distribution: Distribution, dtype: torch.dtype) -> None:
    """Check law 1: a shard that is generated alone equals its part of the whole tensor."""
    whole = Region.whole(regions[0].shape)
    full = generate_values(NAME, whole, dtype=dtype, distribution=distribution)
    assert tuple(full.shape) == whole.shape
    for region in dict.fromkeys(regions):
        made = generate_values(NAME, region, dtype=dtype, distribution=distribution)
        assert tuple(made.shape) == region.local_shape
        assert torch.equal(region.take(full), made)


def check_joining(regions: Sequence[Region], locals_: Sequence[torch.Tensor] | None = None) -> None:
    """Check law 3: all parts together are the tensor, every element of it."""
    whole = Region.whole(regions[0].shape)
    full = generate_values(NAME, whole, dtype=torch.float32, distribution=Normal())
    joined = torch.full_like(full, math.nan)
    for region, local in zip(regions, locals_ or [region.take(full) for region in regions], strict=True):
        region.put(local, joined)
    assert torch.equal(joined, full)


def check_pairing(ours: Sequence[Region], theirs: Sequence[Region]) -> None:
    """Check that two divisions of one tensor overlap in equal elements, and in each element once."""
    full = torch.arange(Region.whole(ours[0].shape).numel).view(ours[0].shape)
    met = torch.zeros(full.numel(), dtype=torch.int64)
    parts = [(region, region.take(full)) for region in dict.fromkeys(theirs)]
    for region in dict.fromkeys(ours):
        local = region.take(full)
        for other, other_local in parts:
            for a, b in region.overlaps(other):
                assert torch.equal(a.of(local), b.of(other_local))
                met[a.of(local).reshape(-1)] += 1
    assert torch.equal(met, torch.ones_like(met))
