"""The three laws of regions, for every split and nesting, flat shards and index lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.regions import (
    DISTRIBUTIONS,
    NAME,
    Division,
    any_regions,
    check_generating,
    check_joining,
    check_pairing,
    divisions,
    flat_regions,
    index_lists,
    law,
    shapes,
)
from ttrace.layouts import ranges as rg
from ttrace.layouts.region import TILING, Region, Shape, measure_coverage
from ttrace.values.generate import Distribution, Normal, generate_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
@given(division=divisions())
@law(60)
def test_generating_a_shard_is_slicing_the_whole(
    division: Division, distribution: Distribution, dtype: torch.dtype
) -> None:
    check_generating(division.regions, distribution, dtype)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
@given(regions=st.one_of(flat_regions(), index_lists()))
@law(60)
def test_generating_flat_shards_and_index_lists_is_slicing_the_whole(
    regions: list[Region], distribution: Distribution
) -> None:
    check_generating(regions, distribution, torch.float32)
    check_generating(regions, distribution, torch.bfloat16)


@given(division=divisions())
@law(300)
def test_the_regions_of_a_layout_tile_the_tensor(division: Division) -> None:
    assert division.layout.coverage(division.shape, division.mesh.sizes) == TILING
    assert measure_coverage(division.regions) == TILING
    held = sum(region.numel for region in set(division.regions))
    assert held == Region.whole(division.shape).numel


@given(regions=st.one_of(flat_regions(), index_lists()))
@law(300)
def test_flat_shards_and_index_lists_tile_the_tensor(regions: list[Region]) -> None:
    assert measure_coverage(regions) == TILING


@given(data=st.data(), regions=any_regions())
@law(200)
def test_a_lost_or_doubled_region_is_counted_exactly(data: st.DataObject, regions: list[Region]) -> None:
    """Counted against the plain way: a tensor of holders, one number per element."""
    distinct = list(dict.fromkeys(regions))
    kept = data.draw(st.lists(st.sampled_from(distinct), min_size=1, unique=True))
    doubled = data.draw(st.sampled_from(distinct))
    kept.append(Region(doubled.shape, doubled.dims, rg.whole(Region(doubled.shape, doubled.dims).numel)))
    holders = torch.zeros(kept[0].shape, dtype=torch.int64)
    for region in dict.fromkeys(kept):
        mine = torch.zeros_like(holders)
        region.put(torch.ones(region.local_shape, dtype=torch.int64), mine)
        holders += mine
    found = measure_coverage(kept)
    assert (found.num_gap, found.num_overlap) == (int((holders == 0).sum()), int((holders > 1).sum()))
    assert found.first_gap == _first(holders == 0)
    assert found.first_overlap == _first(holders > 1)


def _first(mask: torch.Tensor) -> tuple[int, ...] | None:
    where = mask.nonzero()
    return tuple(where[0].tolist()) if len(where) else None


@given(division=divisions())
@law(300)
def test_joining_inverts_dividing(division: Division) -> None:
    """Padding is nobody's: what it holds does not reach the joined tensor."""
    held = []
    for rank, region in enumerate(division.regions):
        made = generate_values(NAME, region, dtype=torch.float32, distribution=Normal())
        held.append(division.padded(region, made, rank))
    check_joining(division.regions, held)


@given(regions=st.one_of(flat_regions(), index_lists()))
@law(300)
def test_joining_inverts_dividing_for_flat_shards_and_index_lists(regions: list[Region]) -> None:
    check_joining(regions)


@given(data=st.data(), shape=shapes())
@law(150)
def test_two_layouts_of_one_tensor_pair_up_each_element_once(data: st.DataObject, shape: Shape) -> None:
    check_pairing(data.draw(any_regions(shape)), data.draw(any_regions(shape)))
