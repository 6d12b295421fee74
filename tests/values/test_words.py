"""Random words: the bits every implementation must make."""

from __future__ import annotations

import torch

from tests.support.words import MASK, NAME, OTHERS, word
from ttrace.values.words import WordStream, make_key


def test_streams_are_these_for_ever() -> None:
    assert make_key(NAME, 0) == -3821379955817393691
    assert make_key(NAME, 7) == -874800633493794822
    assert make_key("a", 0) == -3176261689564211179
    assert [WordStream.of(NAME, seed).step for seed in (0, 7)] == [5076727677734422143, 1167853325982816805]
    assert [word(NAME, index) for index in (0, 1, 1 << 45)] == [
        13696268061861614191,
        862627210044186757,
        14128062942216043502,
    ]


def test_words_do_not_overflow_anywhere() -> None:
    index = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 17, 2**62 + 5])
    found = WordStream.of(NAME).words(index)
    assert [x & MASK for x in found.tolist()] == [word(NAME, i) for i in index.tolist()]


def test_steps_are_odd_in_disorder_and_all_different() -> None:
    steps = [WordStream.of(f"layers.{i}").step & MASK for i in range(10_000)]
    assert len(set(steps)) == len(steps)
    assert all(step % 2 for step in steps)
    assert min((step ^ step >> 1).bit_count() for step in steps) >= 23


def test_no_stream_is_another_from_some_place_on() -> None:
    """With one step for all, the stream of one name went on as that of another, at a place that can be computed."""
    first, second = WordStream.of(NAME), WordStream.of(OTHERS[0])
    for step in (first.step, second.step):
        shift = (second.key - first.key) * pow(step & MASK, -1, 1 << 64) & MASK
        same = sum(word(NAME, shift + i) == word(OTHERS[0], i) for i in range(1, 1000))
        assert same == 0
