"""Parts: together they tile the whole, in the order that frameworks join them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttrace.errors import CaptureError
from ttrace.layouts import ranges as rg
from ttrace.layouts.region import Region
from ttrace.ports.port import Part, place_rows


@given(
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    groups=st.integers(1, 4),
    half=st.sampled_from((0, 1, 2)),
)
def test_parts_tile_the_whole(shares: list[int], groups: int, half: int) -> None:
    sizes = [share * groups * max(2 * half, 1) for share in shares]
    rows = [place_rows(sizes, number, groups=groups, head=2 * half) for number in range(len(sizes))]
    assert [rg.length(own) for own in rows] == sizes
    assert sorted(index for own in rows for index in rg.indices(own).tolist()) == list(range(sum(sizes)))


def test_queries_keys_and_values_by_group() -> None:
    """Four heads of queries, two of keys and values, of three rows each: as Megatron fuses them."""
    q, k, v = torch.arange(12), 100 + torch.arange(6), 200 + torch.arange(6)
    whole = torch.empty(24, dtype=torch.int64)
    for number, part in enumerate((q, k, v)):
        whole[rg.indices(place_rows([12, 6, 6], number, groups=2))] = part
    fused = torch.cat([q.view(2, 2, 3), k.view(2, 1, 3), v.view(2, 1, 3)], dim=1).flatten()
    assert whole.equal(fused)


def test_rotated_halves_become_pairs() -> None:
    """As torchtitan's converter permutes the rows of transformers."""
    w = torch.arange(12)
    whole = torch.empty_like(w)
    whole[rg.indices(place_rows([12], 0, head=6))] = w
    assert whole.equal(w.view(2, 2, 3).transpose(1, 2).reshape(12))


def test_a_region_of_a_part_is_a_region_of_the_whole() -> None:
    whole = torch.randn(8, 3)
    part = Part("w", 1, 8, place_rows([4, 4], 1, groups=2))
    own = Region((4, 3), (((1, 3),), ((0, 3),)))
    assert part.place(own, 0).take(whole).equal(own.take(whole[rg.indices(part.rows)]))


def test_one_expert_is_a_row_of_all() -> None:
    whole = torch.randn(4, 5, 3)
    part = Part("w", 2, 4, ((2, 3),), is_stacked=True)
    own = Region((5, 3), (((1, 4),), ((0, 3),)))
    assert part.place(own, 0).take(whole).equal(whole[2:3, 1:4])


def test_rows_that_have_no_such_groups_are_refused() -> None:
    with pytest.raises(CaptureError, match="cannot be divided into 3 groups"):
        place_rows([4, 2], 0, groups=3)
