"""An explanation says what was measured, who decided, what came before, and which finding speaks for the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import RULE, Case, draw_tensor
from ttrace.errors import TTraceError
from ttrace.judge.explanation import NUM_BEFORE, Explanation, explain
from ttrace.judge.verdict import CauseName, ToleranceRule, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.placement import LayoutSource


def make(folder: Path) -> Case:
    case = Case(folder)
    for i in range(NUM_BEFORE + 2):
        case.add_right(f"0/0/m{i}/output")
    case.add_right("0/1/m0/output")
    case.add("0/0/fc/output", draw_tensor(8, 12), "a b/tp", lambda x: 2 * x)
    case.add("0/0/head/output", draw_tensor(8, 12, seed=5), "a b/tp", lambda x: x + draw_tensor(8, 12, seed=6))
    return case


def explained(case: Case, name: str) -> Explanation:
    return explain(case.judge(), case.reference.close(), case.candidate.close(), TensorId.parse(name))


def test_an_accused_tensor_has_its_finding_and_its_terms(tmp_path: Path) -> None:
    found = explained(make(tmp_path), "0/0/fc/output")
    assert found.comparison.verdict is Verdict.FAIL
    assert found.comparison.tolerance is not None
    assert {term.rule for term in found.comparison.tolerance.terms} >= {ToleranceRule.TWINS, ToleranceRule.FLOOR}
    assert found.finding is not None
    assert found.finding.cause.name is CauseName.DOUBLE_REDUCTION
    (stated,) = found.layouts
    assert (stated.layout, stated.by, stated.ranks, stated.is_everywhere) == ("a b/tp", RULE, (0, 1), True)


def test_what_came_before_is_of_the_same_microbatch_and_nearest_last(tmp_path: Path) -> None:
    before = explained(make(tmp_path), "0/0/fc/output").before
    assert [str(c.id) for c in before] == [f"0/0/m{i}/output" for i in range(2, NUM_BEFORE + 2)]
    assert all(c.verdict is Verdict.PASS for c in before)


def test_the_first_tensor_has_nothing_before_it(tmp_path: Path) -> None:
    found = explained(make(tmp_path), "0/0/m0/output")
    assert found.before == ()
    assert found.finding is None
    assert found.first_finding is not None
    assert str(found.first_finding.comparison.id) == "0/0/fc/output"


def test_ranks_that_do_not_agree_are_told_apart(tmp_path: Path) -> None:
    case, full = Case(tmp_path), draw_tensor(8, 12)
    case.add_trusted("0/0/fc/output", full)
    case.candidate.record(0, "0/0/fc/output", full[:, :6], "a b/tp", shape=(8, 12))
    case.candidate.record(1, "0/0/fc/output", full[:, 6:])
    case.add_right("0/0/m0/output")
    stated = explained(case, "0/0/fc/output").layouts
    assert [(one.by and one.by.source, one.ranks, one.is_everywhere) for one in stated] == [
        (LayoutSource.RULE, (0,), False),
        (LayoutSource.SHAPES, (1,), False),
    ]


def test_a_tensor_that_was_not_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TTraceError, match="does not compare a tensor of this name"):
        explained(make(tmp_path), "0/0/nowhere/output")


def test_a_missing_tensor_has_no_layout(tmp_path: Path) -> None:
    case = make(tmp_path)
    case.add_trusted("0/0/gone/output", torch.ones(4, 4))
    found = explained(case, "0/0/gone/output")
    assert found.comparison.verdict is Verdict.MISSING
    assert found.layouts == ()
