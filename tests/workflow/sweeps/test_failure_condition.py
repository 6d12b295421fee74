"""The simplest condition that separates failures from passes is told, and it is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrace.workflow.sweeps.failure_condition import FailureCondition, Term, Value, find_condition, list_predicates

AXES: dict[str, list[Value]] = {
    "tp": [1, 2, 4],
    "cp": [1, 2],
    "fp8": [False, True],
    "schedule": ["gpipe", "1f1b", "zb"],
}
CELLS = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def found(fails: Callable[..., bool]) -> FailureCondition:
    failures, passes = ([cell for cell in CELLS if fails(**cell) is wanted] for wanted in (True, False))
    return find_condition(AXES, failures, passes)


@pytest.mark.parametrize(
    ("fails", "text", "smallest"),
    [
        (
            lambda tp, cp, fp8, **_: tp > 1 and cp > 1 and fp8,
            "fails iff tp > 1 and cp > 1 and fp8",
            [{"tp": 2, "cp": 2, "fp8": True, "schedule": "gpipe"}],
        ),
        (lambda **_: True, "fails always", [CELLS[0]]),
        (lambda tp, **_: tp == 2, "fails iff tp == 2", [{**CELLS[0], "tp": 2}]),
        (lambda tp, **_: tp != 2, "fails iff tp != 2", [CELLS[0]]),
        (lambda tp, **_: tp < 4, "fails iff tp < 4", [CELLS[0]]),
        (lambda fp8, **_: not fp8, "fails iff not fp8", [CELLS[0]]),
        (lambda schedule, **_: schedule != "1f1b", "fails iff schedule != '1f1b'", [CELLS[0]]),
        (
            lambda tp, schedule, fp8, **_: (tp == 4 and not fp8) or schedule == "zb",
            "fails iff (schedule == 'zb') or (tp > 2 and not fp8)",
            [{**CELLS[0], "schedule": "zb"}, {**CELLS[0], "tp": 4}],
        ),
    ],
)
def test_the_condition_is_the_simplest(fails: Callable[..., bool], text: str, smallest: list[object]) -> None:
    result = found(fails)
    assert str(result) == text
    assert list(result.smallest) == smallest


def test_what_no_simple_condition_separates_is_said_to_be_so() -> None:
    axes: dict[str, list[Value]] = {name: [1, 2, 3, 4, 5] for name in "ab"}
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    diagonal = [cell for cell in cells if cell["a"] == cell["b"]]
    result = find_condition(axes, diagonal, [cell for cell in cells if cell not in diagonal])
    assert str(result) == "no simple condition separates the failures from the passes"
    assert result.smallest == ({"a": 1, "b": 1},)


def test_cells_that_were_not_judged_count_on_neither_side() -> None:
    failures = [cell for cell in CELLS if cell["tp"] == 4 and cell["fp8"]]
    passes = [cell for cell in CELLS if cell["tp"] == 1]
    assert str(find_condition(AXES, failures, passes)) == "fails iff tp > 1"


def test_of_a_single_value_nothing_is_said() -> None:
    assert list_predicates("tp", [2]) == []
    axes: dict[str, list[Value]] = {"tp": [2], "fp8": [False, True]}
    failing = {"tp": 2, "fp8": True}
    assert find_condition(axes, [failing], [{"tp": 2, "fp8": False}]).terms == (
        Term((list_predicates("fp8", [False, True])[0],)),
    )


@given(st.lists(st.booleans(), min_size=len(CELLS), max_size=len(CELLS)).filter(any))
def test_every_condition_is_exact(fails: list[bool]) -> None:
    failures, passes = ([c for c, failed in zip(CELLS, fails, strict=True) if failed is w] for w in (True, False))
    result = find_condition(AXES, failures, passes)
    if result.terms:
        assert [any(term.holds(cell) for term in result.terms) for cell in CELLS] == fails
    assert all(cell in failures for cell in result.smallest)
