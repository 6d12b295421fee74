"""What a module computes otherwise is named: a function of only one side, a part that does not count once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.causes.formulas import _FUNCTIONS
from ttrace.judge.verdict import Cause, CauseName

NAME = "0/0/router/output"
FULL = draw_tensor(8, 12)


def find_cause(folder: Path, wrong: torch.Tensor, right: torch.Tensor = FULL, name: str = NAME) -> Cause:
    case = Case(folder)
    case.add(name, right, "a b", lambda _: wrong)
    return case.judge().findings[0].cause


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_a_function_of_only_one_side_is_named(tmp_path: Path, name: str) -> None:
    changed = _FUNCTIONS[name](FULL)
    more, less = find_cause(tmp_path / "more", changed), find_cause(tmp_path / "less", FULL, changed)
    assert more.name == less.name == CauseName.FUNCTION
    assert more.sentence == f"the candidate is the {name} of the reference: only the candidate applies it"
    assert less.sentence == f"the reference is the {name} of the candidate: only the reference applies it"


def test_a_near_miss_and_a_gradient_are_not_named(tmp_path: Path) -> None:
    wrong = FULL.softmax(-1)
    near = find_cause(tmp_path / "near", nudge(wrong, 0.05))
    gradient = find_cause(tmp_path / "gradient", wrong, name="0/0/router/grad_output")
    assert near.name == gradient.name == CauseName.UNEXPLAINED


PART = draw_tensor(8, 12, seed=3)


@pytest.mark.parametrize("kind", ["output", "grad_input"])
@pytest.mark.parametrize(
    ("count", "words"), [(1, "added once too often"), (3, "added 3 times too often"), (-1, "left out"), (0.5, None)]
)
def test_a_part_that_does_not_count_once_is_named(tmp_path: Path, kind: str, count: float, words: str | None) -> None:
    case = Case(tmp_path)
    case.add_trusted(f"0/0/router.inner/{kind}", PART)
    for rank in range(2):
        case.candidate.record(rank, f"0/0/router.inner/{kind}", PART, "a b")
    case.add(f"0/0/router/{kind}", FULL, "a b", lambda _: FULL + count * PART)
    found = case.judge().findings[0].cause
    what = "output" if kind == "output" else "gradient"
    assert found.sentence == (
        f"the {what} of router.inner is {words}" if words else "no known pattern explains the difference"
    )
