"""A plain tensor says which rows it holds, cheaply, and what it says is a region."""

from __future__ import annotations

import pytest
import torch

import ttrace
from tests.support.speed import cpu_limit
from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.holds import find_held
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region, measure_coverage
from ttrace.trace.format import Record
from ttrace.trace.lines import decode, encode


def test_the_tensor_itself_comes_back_and_says_what_it_holds() -> None:
    rows = torch.randn(3, 4)
    assert ttrace.holds(rows, torch.tensor([5, 0, 1]), 8) is rows
    held = find_held(rows)
    assert held is not None
    region = held.region((3, 4))
    full = torch.arange(32).view(8, 4)
    assert torch.equal(region.take(full), full[[5, 0, 1]])


def test_any_dim_may_be_held() -> None:
    columns = ttrace.holds(torch.randn(2, 3), torch.tensor([4, 2, 0]), 5, dim=-1)
    held = find_held(columns)
    assert held is not None
    assert held.region((2, 3)) == Region((2, 5), (rg.whole(2), ((4, 5), (2, 3), (0, 1))))


def test_only_what_was_said_is_held() -> None:
    rows = ttrace.holds(torch.randn(3, 4), torch.tensor([5, 0, 1]), 8)
    assert find_held(rows.clone()) is None
    held = find_held(rows)
    assert held is not None
    assert held.fits((3, 9))
    assert not held.fits((4, 9))
    assert not held.fits(())


@pytest.mark.parametrize("indices", [torch.arange(4), torch.arange(4).view(2, 2), torch.tensor(0)])
def test_every_row_needs_an_index(indices: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"shape \(3, 2\) needs one index for each element of dim 0"):
        ttrace.holds(torch.randn(3, 2), indices, 8)


def test_thousands_of_scattered_rows_are_placed_in_no_time() -> None:
    """Two ranks hold 16384 slots each, in any order: nearly every range has one index."""
    order = torch.randperm(2**15, generator=torch.Generator().manual_seed(0))
    full = torch.arange(2**17).view(2**15, 4)
    with cpu_limit(3.0):
        regions = [Region((2**15, 4), (rg.from_indices(part), rg.whole(4))) for part in order.chunk(2)]
        lines = [
            encode(Record(TensorId.parse("0/0/experts/input"), region.local_shape, torch.float32, region, end=2**18))
            for region in regions
        ]
        assert [decode(line).region for line in lines] == regions
        assert measure_coverage(regions).is_tiling
        joined = torch.empty_like(full)
        for region in regions:
            region.put(region.take(full), joined)
    assert torch.equal(joined, full)
