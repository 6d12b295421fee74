"""Ranges are what lists of indices are, only shorter: every function is checked against the list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttrace.layouts import ranges as rg
from ttrace.layouts.ranges import Ranges

orders = st.integers(0, 40).flatmap(lambda size: st.permutations(range(size)))


def of(order: list[int]) -> Ranges:
    return rg.from_indices(torch.tensor(order, dtype=torch.int64))


@given(orders)
def test_indices_read_back_as_they_were_listed(order: list[int]) -> None:
    assert rg.indices(of(order)).tolist() == order
    assert rg.length(of(order)) == len(order)


@given(orders)
def test_ranges_of_indices_are_already_merged(order: list[int]) -> None:
    assert rg.merge(of(order)) == of(order)


def test_merging_joins_neighbours_and_drops_empty_ranges_but_keeps_the_order() -> None:
    assert rg.merge([(0, 2), (2, 2), (2, 5), (7, 6), (4, 6), (0, 1)]) == ((0, 5), (4, 6), (0, 1))
    assert rg.merge([(2, 4), (0, 2)]) == ((2, 4), (0, 2))
    assert rg.merge([]) == ()


def test_the_whole_of_nothing_is_no_range() -> None:
    assert rg.whole(0) == ()
    assert rg.whole(3) == ((0, 3),)
    assert rg.indices(()).dtype == torch.int64


@given(data=st.data(), outer=orders)
def test_selecting_picks_positions(data: st.DataObject, outer: list[int]) -> None:
    inner = data.draw(st.lists(st.sampled_from(range(len(outer))), unique=True)) if outer else []
    assert rg.select(of(outer), of(inner)) == of([outer[i] for i in inner])


@given(data=st.data(), a=orders, b=orders)
def test_common_runs_are_the_shared_indices_once(data: st.DataObject, a: list[int], b: list[int]) -> None:
    a = a[: data.draw(st.integers(0, len(a)))]
    b = b[: data.draw(st.integers(0, len(b)))]
    shared = []
    for at, bt, size in rg.intersect(of(a), of(b)):
        assert a[at : at + size] == b[bt : bt + size]
        shared += a[at : at + size]
    assert shared == sorted(set(a) & set(b))


def test_positions_say_where_each_range_starts_locally() -> None:
    assert list(rg.positions(((6, 8), (0, 3)))) == [(6, 8, 0), (0, 3, 2)]
    assert list(rg.positions(())) == []


@pytest.mark.parametrize("b", [((0, 8),), ((6, 8), (1, 3)), ((9, 12),), (), ((3, 4), (0, 1), (11, 12))])
def test_common_positions_are_those_of_the_common_runs(b: Ranges) -> None:
    a = ((5, 9), (0, 2), (3, 4))
    runs = rg.intersect(a, b)
    at, bt = rg.intersect_positions(a, b)
    assert at.tolist() == [x + i for x, _, length in runs for i in range(length)]
    assert bt.tolist() == [y + i for _, y, length in runs for i in range(length)]
