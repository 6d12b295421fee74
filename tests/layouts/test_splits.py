"""Each split deals the indices it says it deals; what it cannot deal it refuses with the reason."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.splits import Split, split


def dealt(word: str, size: int, world: int) -> list[list[int]]:
    how = Split.parse(word)
    return [rg.indices(how.ranges(size, rank, world)).tolist() for rank in range(world)]


@pytest.mark.parametrize(
    ("word", "size", "expected"),
    [
        ("block", 7, [[0, 1, 2, 3], [4, 5, 6]]),
        ("balanced", 7, [[0, 1, 2, 3], [4, 5, 6]]),
        ("zigzag", 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", 7, [[0, 1, 6], [2, 3, 4, 5]]),
        ("striped", 5, [[0, 2, 4], [1, 3]]),
        ("striped(2)", 7, [[0, 1, 4, 5], [2, 3, 6]]),
        ("fused(2)", 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("fused(2,1,1)", 8, [[0, 1, 4, 6], [2, 3, 5, 7]]),
        ("padded", 5, [[0, 1, 2], [3, 4]]),
        ("padded(4)", 5, [[0, 1, 2, 3], [4]]),
        ("padded(4)", 3, [[0, 1, 2], []]),
    ],
)
def test_two_ranks_hold(word: str, size: int, expected: list[list[int]]) -> None:
    assert dealt(word, size, 2) == expected


@given(size=st.integers(0, 100), world=st.integers(1, 70))
def test_block_is_torch_chunk_and_balanced_is_tensor_split(size: int, world: int) -> None:
    whole = torch.arange(size)
    chunks = [part.tolist() for part in whole.chunk(world)] if size else []
    assert dealt("block", size, world) == chunks + [[]] * (world - len(chunks))
    assert dealt("balanced", size, world) == [part.tolist() for part in whole.tensor_split(world)]


def test_only_a_padded_dim_is_longer_than_what_it_holds() -> None:
    assert [Split.parse("padded(4)").local_size(5, rank, 2) for rank in (0, 1)] == [4, 4]
    assert [Split.parse("padded").local_size(5, rank, 2) for rank in (0, 1)] == [3, 3]
    assert [Split.parse("block").local_size(5, rank, 2) for rank in (0, 1)] == [3, 2]


@pytest.mark.parametrize("text", ["block", "striped(3)", "fused(4,1,1)"])
def test_a_split_reads_back_as_it_was_written(text: str) -> None:
    assert str(Split.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["zagzig", "block()", "striped(-1)", "striped(1, 2)", "striped(٣)", f"fused({'9' * 5000})", ""]
)
def test_an_unknown_split_is_named_with_the_known_ones(text: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(f"{text!r} is not a split. Known: ")) as error:
        Split.parse(text)
    assert "zigzag" in str(error.value)


@pytest.mark.parametrize(
    ("word", "size", "message"),
    [
        (
            "fused(3)",
            8,
            "fused(3): 8 indices do not divide into these parts. Write fused(n) for n equal parts",
        ),
        ("fused(2,1)", 8, "fused(2,1): 8 indices do not divide"),
        ("fused(999999999999)", 8, "fused(999999999999): 8 indices do not divide"),
        ("fused", 8, "fused(): 8 indices do not divide"),
        ("fused(0,0)", 8, "fused(0,0): 8 indices do not divide"),
        ("striped(0)", 8, "striped(0): a stripe has at least one index"),
        ("padded(0)", 8, "padded(0): a dim is padded to a multiple of at least 1"),
        ("block(2)", 8, "split block(2): the number of arguments in parentheses is wrong"),
    ],
)
def test_a_split_that_does_not_fit_says_why(word: str, size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Split.parse(word).ranges(size, 0, 2)


def test_a_split_may_not_take_a_name_that_is_taken_or_unreadable() -> None:
    def block(size: int, rank: int, world: int) -> rg.Ranges:  # noqa: ARG001
        return ((0, size),)

    def Upper(size: int, rank: int, world: int) -> rg.Ranges:  # noqa: ARG001, N802
        return ((0, size),)

    for function in (block, Upper):
        with pytest.raises(LayoutError, match=f"cannot be named '{function.__name__}'"):
            split(function)
