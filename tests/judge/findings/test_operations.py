"""Of a wrong gradient, what only it goes through, or what only it does not, is the operation that is blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ledgers import make_collective
from ttrace.judge.findings.isolated import combine
from ttrace.judge.verdict import (
    Cause,
    CauseName,
    Comparison,
    Finding,
    Judgement,
    Verdict,
    WrongOperation,
    WrongOperations,
)
from ttrace.layouts.ids import Kind, TensorId
from ttrace.report.facts import describe_operation
from ttrace.trace.collectives import Phase

HOOK = WrongOperation("div", "train.py:5")
REDUCTION = WrongOperation(
    "all_reduce", "train.py:9", collective=make_collective("all_reduce", source="train.py:9"), is_left_out=True
)
CUSTOM = WrongOperation("Overlapped", "layers.py:3", called_at="layers.py:9", is_backward=True)
PLAIN = WrongOperation("linear", "layers.py:7", is_backward=True)


def find(kind: Kind, cause: CauseName, operations: WrongOperations) -> WrongOperation | None:
    name = "fc.weight" if kind.is_of_param else "fc"
    comparison = Comparison(TensorId.of(0, None, name, kind), Verdict.FAIL)
    finding = Finding(comparison, "fc", "", Cause(cause, "words"), 0)
    judgement = Judgement((comparison,), (finding,), ())
    return combine(judgement, replace(judgement, operations=operations)).findings[0].operation


BOTH = WrongOperations(changes={"fc.weight": HOOK}, left_out={"fc.weight": REDUCTION})


@pytest.mark.parametrize(
    ("cause", "operations", "expected"),
    [
        (CauseName.MISSING_ALL_REDUCE, BOTH, REDUCTION),
        (CauseName.DOUBLE_REDUCTION, BOTH, HOOK),
        (CauseName.MISSING_AVERAGE, WrongOperations({("fc", Phase.BACKWARD): PLAIN}), None),
        (CauseName.MISSING_AVERAGE, WrongOperations({("fc", Phase.BACKWARD): CUSTOM}), CUSTOM),
        (CauseName.ZEROS, WrongOperations({("fc", Phase.BACKWARD): PLAIN}), PLAIN),
    ],
)
def test_the_operation_of_a_wrong_gradient_depends_on_the_cause(
    cause: CauseName, operations: WrongOperations, expected: WrongOperation | None
) -> None:
    assert find(Kind.PARAM_GRAD, cause, operations) == expected


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.UPDATE, Kind.GRAD_NORM])
def test_no_operation_of_a_pass_is_blamed_for_what_is_wrong_before_or_after_it(kind: Kind) -> None:
    operations = replace(BOTH, in_modules={("fc", Phase.FORWARD): PLAIN, ("fc", Phase.BACKWARD): PLAIN})
    assert find(kind, CauseName.UNEXPLAINED, operations) is None


def test_a_reduction_that_leaves_one_gradient_out_is_described_so() -> None:
    assert describe_operation(REDUCTION).endswith("at train.py:9 takes other gradients, and not this one")
