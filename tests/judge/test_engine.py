"""Engine of threads: results come in order, from threads for large tensors and without them for small ones."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from ttrace.judge.engine import Lot, Threads
from ttrace.layouts.ids import TensorId

IDS = [TensorId.parse(f"0/0/layers.{number}/output") for number in range(40)]
SMALL, LARGE = 16, 1 << 20
"""Bytes of a tensor."""


@dataclass(frozen=True)
class Context:
    """What the work is given."""

    identity: str = "these"


def work(_context: Context, ids: Sequence[TensorId]) -> list[tuple[TensorId, bool]]:
    return [(tensor_id, threading.current_thread() is threading.main_thread()) for tensor_id in ids]


def run(*sizes: int) -> list[tuple[TensorId, bool]]:
    """Return the ids in the order of their results, and whether each comes from the main thread."""
    lots = [Lot(IDS[2 * number : 2 * number + 2], 2 * size) for number, size in enumerate(sizes)]
    return list(Threads(2).map(work, Context(), lots))


@pytest.mark.parametrize(("size", "is_here"), [(SMALL, True), (LARGE, False)])
def test_only_what_is_worth_a_thread_gets_one(size: int, is_here: bool) -> None:
    assert run(*[size] * 20) == [(tensor_id, is_here) for tensor_id in IDS]


def test_results_of_both_come_in_order() -> None:
    found = run(*[SMALL, LARGE, LARGE, SMALL, LARGE] * 4)
    assert [tensor_id for tensor_id, _ in found] == IDS
    assert {is_here for _, is_here in found} == {True, False}


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_an_error_is_raised_where_results_are_taken(size: int) -> None:
    def fail(_context: Context, _ids: Sequence[TensorId]) -> list[TensorId]:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        list(Threads(2).map(fail, Context(), [Lot(IDS, size * len(IDS))]))
