"""Orders of dims: what is transposed comes back, and regions follow."""

from __future__ import annotations

import pytest
import torch

from ttrace.errors import CaptureError, TTraceError
from ttrace.layouts.region import Region
from ttrace.ports.dim_order import DimOrder

SWAPPED = DimOrder.parse("batch seq ... -> seq batch ...")
MERGED = DimOrder.parse("(batch seq) ... -> (seq batch) ...")


def test_a_transposed_tensor_comes_back() -> None:
    sizes: dict[str, int] = {}
    change = SWAPPED.find_transposition(3, sizes)
    assert change is not None
    x = torch.randn(2, 5, 3)
    assert change.apply(x).shape == (5, 2, 3)
    assert change.undo(change.apply(x)).equal(x)
    assert sizes == {"batch": 2, "seq": 5}


def test_a_region_is_transposed_with_its_tensor() -> None:
    change = SWAPPED.find_transposition(3, {})
    assert change is not None
    full = torch.arange(60).view(4, 5, 3)
    region = Region((4, 5, 3), (((1, 3),), ((0, 5),), ((0, 3),)))
    assert change.place(region).take(full.transpose(0, 1)).equal(change.apply(region.take(full)))


def test_dims_that_are_one_are_transposed_by_the_sizes_seen_before() -> None:
    sizes: dict[str, int] = {}
    before, change = SWAPPED.find_transposition(3, sizes), MERGED.find_transposition(2, sizes)
    assert before is not None
    assert change is not None
    x = torch.randn(2, 5, 3)
    with pytest.raises(CaptureError, match="sizes of batch and seq"):
        change.apply(x.flatten(0, 1))
    before.apply(x)
    assert change.apply(x.flatten(0, 1)).equal(x.transpose(0, 1).flatten(0, 1))
    assert change.undo(change.apply(x.flatten(0, 1))).equal(x.flatten(0, 1))


def test_other_tensors_stay() -> None:
    assert SWAPPED.find_transposition(1, {}) is None
    assert DimOrder.parse("in out -> out in").find_transposition(3, {}) is None
    assert DimOrder.parse("a b -> a b").find_transposition(2, {}) is None


@pytest.mark.parametrize(
    "text", ["", "batch seq", "a b -> a", "a a -> a a", "... a -> a ...", "(a b) -> b a", "a -> b", "a b -> b a -> a b"]
)
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(TTraceError, match="not an order of dims"):
        DimOrder.parse(text)
