"""Coverage finds what nobody holds and what different regions hold, and where."""

from __future__ import annotations

import pytest

from ttrace.layouts.region import Region
from ttrace.tensors.coverage import TILING, Coverage, measure_coverage


def rows(start: int, stop: int) -> Region:
    return Region((4, 6), (((start, stop),), ((0, 6),)))


def test_exact_replicas_count_once() -> None:
    assert measure_coverage([rows(0, 2), rows(2, 4), rows(0, 2), rows(2, 4)]) == TILING
    assert measure_coverage([Region.whole((4, 6))] * 3).is_tiling


def test_a_gap_is_counted_and_located() -> None:
    assert measure_coverage([rows(0, 1), rows(3, 4)]) == Coverage(12, 0, (1, 0), None)


def test_an_overlap_of_different_regions_is_counted_and_located() -> None:
    found = measure_coverage([rows(0, 3), rows(2, 4)])
    assert found == Coverage(0, 6, None, (2, 0))
    assert not found.is_tiling


def test_the_same_elements_in_another_order_overlap() -> None:
    assert measure_coverage([Region((2,), (((0, 1), (1, 2)),)), Region((2,), (((1, 2), (0, 1)),))]).num_overlap == 2


def test_flat_shards_and_boxes_are_counted_together() -> None:
    box = Region((4, 6), (((0, 4),), ((0, 3),)))
    other = Region((4, 6), (((0, 4),), ((3, 6),)), ((0, 11),))
    assert measure_coverage([box, other]) == Coverage(1, 0, (3, 5), None)


def test_a_tensor_without_elements_is_tiled_by_nothing() -> None:
    assert measure_coverage([Region((0, 6), ((), ((0, 6),)))]) == TILING
    assert measure_coverage([Region((0, 6), ((), ((0, 3),))), Region((0, 6), ((), ((3, 6),)))]) == TILING


def test_a_scalar_is_held_or_not() -> None:
    assert measure_coverage([Region.whole(())]) == TILING
    assert measure_coverage([Region.flat_of((), ())]) == Coverage(1, 0, (), None)


def test_no_region_covers_nothing() -> None:
    with pytest.raises(ValueError, match="no region to cover anything with"):
        measure_coverage([])
