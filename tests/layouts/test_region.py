"""A region slices, joins and meets other regions; flat ones too."""

from __future__ import annotations

import pytest
import torch

from ttrace.layouts import ranges as rg
from ttrace.layouts.region import TILING, Coverage, Region, measure_coverage

FULL = torch.arange(24).view(4, 6)


def test_a_single_box_is_taken_as_a_view() -> None:
    region = Region((4, 6), (((1, 3),), ((0, 6),)))
    part = region.take(FULL)
    assert part.tolist() == FULL[1:3].tolist()
    assert part.data_ptr() == FULL[1].data_ptr()
    assert Region.whole((4, 6)).take(FULL) is FULL


def test_ranges_are_taken_in_their_order() -> None:
    region = Region((4, 6), (((3, 4), (0, 1)), ((4, 6), (0, 1))))
    assert region.take(FULL).tolist() == [[22, 23, 18], [4, 5, 0]]
    assert region.local_shape == (2, 3)


def test_a_flat_shard_counts_within_its_box() -> None:
    box = (((0, 4),), ((3, 6),))
    region = Region((4, 6), box, ((2, 7),))
    assert region.local_shape == (5,)
    assert region.box_shape == (4, 3)
    assert region.take(FULL).tolist() == [5, 9, 10, 11, 15]


def test_a_flat_shard_of_the_whole_counts_within_the_tensor() -> None:
    region = Region.flat_of((4, 6), ((5, 5), (5, 7), (7, 14)))
    assert region.flat == ((5, 14),)
    assert region.take(FULL).tolist() == list(range(5, 14))
    assert not region.is_whole


def test_a_flat_run_becomes_few_boxes_in_order() -> None:
    region = Region.flat_of((3, 4, 5), ((7, 53),))
    boxes = region.boxes()
    full = torch.arange(60).view(3, 4, 5)
    assert torch.cat([Region((3, 4, 5), box.dims).take(full).reshape(-1) for box in boxes]).tolist() == list(
        range(7, 53)
    )
    assert len(boxes) == 5


def test_an_empty_shard_holds_nothing() -> None:
    region = Region((4, 6), ((), ((0, 6),)))
    assert region.local_shape == (0, 6)
    assert region.numel == 0
    assert region.take(FULL).shape == (0, 6)
    assert list(region.overlaps(Region.whole((4, 6)))) == []


def test_a_scalar_is_whole_flat_or_not() -> None:
    for region in (Region.whole(()), Region.flat_of((), ((0, 1),))):
        joined = torch.zeros(())
        region.put(region.take(torch.tensor(7.0)), joined)
        assert joined == 7.0
    assert Region.whole(()).is_whole


def test_putting_writes_only_its_own_part() -> None:
    joined = torch.full((4, 6), -1)
    region = Region((4, 6), (((3, 4), (0, 1)), ((4, 6),)))
    region.put(region.take(FULL), joined)
    assert joined[0].tolist() == [-1, -1, -1, -1, 4, 5]
    assert joined[3].tolist() == [-1, -1, -1, -1, 22, 23]
    assert bool((joined[1:3] == -1).all())


def test_putting_takes_a_local_tensor_that_is_not_contiguous() -> None:
    joined = torch.zeros(4, 6, dtype=torch.int64)
    strided = torch.stack([torch.arange(9) + 5, torch.zeros(9, dtype=torch.int64)], dim=1)[:, 0]
    Region.flat_of((4, 6), ((5, 14),)).put(strided, joined)
    assert joined.view(-1)[5:14].tolist() == list(range(5, 14))


def test_many_runs_are_gathered_at_once() -> None:
    """Dispatched tokens have as many runs as tokens; a loop over runs would be a loop over elements."""
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    region = Region((500, 3), (rg.from_indices(order), rg.whole(3)))
    parts = list(region.overlaps(Region.whole((500, 3))))
    assert len(parts) == 1
    full = torch.arange(1500).view(500, 3)
    ours, theirs = parts[0]
    assert torch.equal(ours.of(full[order]), theirs.of(full))


def test_linear_indices_are_those_of_the_elements() -> None:
    for region in (
        Region.whole((4, 6)),
        Region((4, 6), (((3, 4), (0, 1)), ((4, 6), (0, 1)))),
        Region((4, 6), (((0, 4),), ((3, 6),)), ((2, 7),)),
        Region((4, 6), ((), ((0, 6),))),
    ):
        rows, columns = region.linear()
        assert (rows[:, None] + columns).reshape(-1).tolist() == region.take(FULL).reshape(-1).tolist()


@pytest.mark.parametrize(
    "region",
    [
        Region.whole((4, 6)),
        Region((4, 6), (((3, 4), (0, 1)), ((4, 6), (0, 1)))),
        Region((4, 6), (((0, 4),), ((3, 6),)), ((2, 7), (8, 9))),
    ],
)
def test_elements_are_looked_up_and_found(region: Region) -> None:
    held = region.take(FULL).flatten()
    at = torch.arange(len(held))
    assert torch.equal(region.look_up(at), held)
    assert torch.equal(region.find_positions(held), at)
    elsewhere = [index for index in range(24) if index not in held.tolist()]
    assert region.find_positions(torch.tensor(elsewhere, dtype=torch.int64)).tolist() == [-1] * len(elsewhere)
    last = tuple(size - 1 for size in region.local_shape)
    assert FULL[region.find_index(last)] == held[-1]


def test_linear_indices_of_long_rows_stay_factored() -> None:
    rows, columns = Region.whole((100, 5000)).linear()
    assert (rows.numel(), columns.numel()) == (100, 5000)


def test_regions_are_values() -> None:
    assert len({Region.whole((4, 6)), Region.whole((4, 6)), Region.flat_of((4, 6), ((0, 24),))}) == 2


def test_a_region_within_another_is_what_both_cut() -> None:
    """Tensor parallelism inside zigzag context parallelism: the DTensor knows only what its own ranks share."""
    outer = Region((8, 6), (((0, 2), (6, 8)), ((0, 6),)))
    inner = Region((4, 6), (((1, 4),), ((3, 6),)))
    full = torch.arange(48).view(8, 6)
    assert torch.equal(inner.within(outer).take(full), inner.take(outer.take(full)))
    assert inner.within(outer).shape == (8, 6)


# Coverage finds what nobody holds and what different regions hold, and where.


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
    with pytest.raises(ValueError, match="there are no regions"):
        measure_coverage([])
