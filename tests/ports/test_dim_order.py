"""Orders of dims: what is turned comes back, and regions follow."""

from __future__ import annotations

import pytest
import torch

from ttrace.errors import CaptureError, TTraceError
from ttrace.ports.dim_order import DimOrder
from ttrace.tensors.region import Region

SWAPPED = DimOrder.parse("batch seq ... -> seq batch ...")
MERGED = DimOrder.parse("(batch seq) ... -> (seq batch) ...")


def test_a_turned_tensor_comes_back() -> None:
    sizes: dict[str, int] = {}
    turn = SWAPPED.find_turn(3, sizes)
    assert turn is not None
    x = torch.randn(2, 5, 3)
    assert turn.turn(x).shape == (5, 2, 3)
    assert turn.turn_back(turn.turn(x)).equal(x)
    assert sizes == {"batch": 2, "seq": 5}


def test_a_region_is_turned_with_its_tensor() -> None:
    turn = SWAPPED.find_turn(3, {})
    assert turn is not None
    full = torch.arange(60).view(4, 5, 3)
    region = Region((4, 5, 3), (((1, 3),), ((0, 5),), ((0, 3),)))
    assert turn.place(region).take(full.transpose(0, 1)).equal(turn.turn(region.take(full)))


def test_dims_that_are_one_are_turned_by_the_sizes_seen_before() -> None:
    sizes: dict[str, int] = {}
    before, turn = SWAPPED.find_turn(3, sizes), MERGED.find_turn(2, sizes)
    assert before is not None
    assert turn is not None
    x = torch.randn(2, 5, 3)
    with pytest.raises(CaptureError, match="sizes of batch and seq"):
        turn.turn(x.flatten(0, 1))
    before.turn(x)
    assert turn.turn(x.flatten(0, 1)).equal(x.transpose(0, 1).flatten(0, 1))
    assert turn.turn_back(turn.turn(x.flatten(0, 1))).equal(x.flatten(0, 1))


def test_other_tensors_stay() -> None:
    assert SWAPPED.find_turn(1, {}) is None
    assert DimOrder.parse("in out -> out in").find_turn(3, {}) is None
    assert DimOrder.parse("a b -> a b").find_turn(2, {}) is None


@pytest.mark.parametrize(
    "text", ["", "batch seq", "a b -> a", "a a -> a a", "... a -> a ...", "(a b) -> b a", "a -> b", "a b -> b a -> a b"]
)
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(TTraceError, match="no order of dims"):
        DimOrder.parse(text)
