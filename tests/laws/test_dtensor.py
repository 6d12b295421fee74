"""The three laws for DTensor placements, and torch's own word on them; ranks are coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from tests.support.device_meshes import mesh_of
from tests.support.regions import (
    DISTRIBUTIONS,
    check_generating,
    check_joining,
    check_pairing,
    divisions,
    law,
    shapes,
)
from ttrace.adapters.native.layouts import find_region
from ttrace.compat.distributed import make_strided_shard, split_locally
from ttrace.compat.torch import RELEASE
from ttrace.layouts.region import TILING, Region, Shape, measure_coverage
from ttrace.values.generate import Distribution


@dataclass(frozen=True)
class LayoutResolver:
    """Placements of one logical tensor on a device mesh, seen from every rank."""

    shape: Shape
    mesh_shape: Shape
    placements: tuple[Placement, ...]

    def mesh(self, rank: int) -> DeviceMesh:
        ranks = torch.arange(math.prod(self.mesh_shape)).view(self.mesh_shape)
        names = tuple("abc"[: len(self.mesh_shape)])
        return mesh_of(ranks, rank, names)

    @property
    def meshes(self) -> list[DeviceMesh]:
        return [self.mesh(rank) for rank in range(math.prod(self.mesh_shape))]

    @property
    def regions(self) -> list[Region]:
        return [find_region(self.shape, mesh, self.placements) for mesh in self.meshes]


@st.composite
def placings(draw: st.DrawFn, shape: Shape | None = None, max_ranks: int = 64) -> LayoutResolver:
    shape = draw(shapes()) if shape is None else shape
    mesh_shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        mesh_shape.append(draw(st.integers(1, max_ranks // math.prod(mesh_shape))))
    dims = st.integers(0, len(shape) - 1)
    placement: st.SearchStrategy[Placement] = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        *([st.builds(make_strided_shard, dims, st.integers(1, 4))] if RELEASE >= (2, 8) else []),  # even only before
    )
    placements = draw(st.lists(placement, min_size=len(mesh_shape), max_size=len(mesh_shape)))
    return LayoutResolver(shape, tuple(mesh_shape), tuple(placements))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
@given(placing=placings())
@law(20)
def test_generating_a_shard_is_slicing_the_whole(placing: LayoutResolver, distribution: Distribution) -> None:
    regions = placing.regions
    check_generating(regions, distribution, torch.float32)
    check_generating(regions, distribution, torch.bfloat16)


@given(placing=placings())
@law(40)
def test_the_regions_of_placements_tile_the_tensor(placing: LayoutResolver) -> None:
    assert measure_coverage(placing.regions) == TILING


@given(placing=placings())
@law(40)
def test_joining_inverts_dividing(placing: LayoutResolver) -> None:
    check_joining(placing.regions)


@given(placing=placings())
@law(40)
def test_torch_distributes_exactly_these_regions(placing: LayoutResolver) -> None:
    full = torch.arange(math.prod(placing.shape)).view(placing.shape)
    for mesh in placing.meshes:
        local = split_locally(full, mesh, placing.placements)
        assert torch.equal(local, find_region(placing.shape, mesh, placing.placements).take(full))


@given(data=st.data(), shape=shapes())
@law(40)
def test_placements_and_layouts_pair_up_each_element_once(data: st.DataObject, shape: Shape) -> None:
    placing = data.draw(placings(shape, max_ranks=12))
    division = data.draw(divisions(shape, max_ranks=12))
    check_pairing(placing.regions, division.regions)
