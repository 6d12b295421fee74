"""Of a wrong gradient, what only it goes through, or what only it does not, is the operation that is blamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ledgers import make_collective, write_ledgers
from ttrace.judge.communication import Communication, LedgerFact
from ttrace.judge.findings.isolated import combine
from ttrace.judge.findings.operations import add_ledger
from ttrace.judge.verdict import (
    Cause,
    CauseName,
    Comparison,
    Finding,
    Judgement,
    Tolerance,
    Verdict,
    WrongOperation,
    WrongOperations,
)
from ttrace.layouts.ids import Kind, Phase, TensorId
from ttrace.report.facts import describe_operation, list_facts
from ttrace.trace.collectives import Collective

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


# A finding that speaks of a reduction quotes the ledger: where it ran, where it should have, or that none did.


MODULES = {f"layers.{i}.fc{j}": "Linear" for i in range(3) for j in (1, 2)}


def find_in_ledger(
    folder: Path, ledger: list[Collective], cause: CauseName, kind: Kind, axis: str | None = "tp"
) -> Finding:
    """Make a finding in layers.1.fc2, and look it up in a ledger."""
    comparison = Comparison(
        TensorId.of(0, 0, "layers.1.fc2", kind), Verdict.CONFLICT, tolerance=Tolerance(1e-6, 1e-7, 1e-7)
    )
    finding = Finding(comparison, "layers.1.fc2", "", Cause(cause, "words", axis), 0)
    return add_ledger(finding, Communication(write_ledgers(folder, "dp=2 tp=2", [ledger, *([],) * 3], MODULES)))


def read(finding: Finding) -> str:
    return next(text for label, text in list_facts(finding, ()) if label == "ledger")


def test_a_missing_reduction_quotes_the_layer_that_has_it(tmp_path: Path) -> None:
    ledger = [make_collective(module=f"layers.{i}.fc2", source=f"tp.py:{i}") for i in (0, 2)]
    found = find_in_ledger(tmp_path, ledger, CauseName.MISSING_ALL_REDUCE, Kind.OUTPUT)
    assert read(found) == (
        "layers.0.fc2 has all_reduce (sum) over tp at tp.py:0 here, layers.1.fc2 has no reduction over tp"
    )


def test_a_reduction_that_ran_is_said_to_have_run(tmp_path: Path) -> None:
    ledger = [make_collective(module="layers.1.fc2", phase=Phase.BACKWARD, issuer="DTensor")]
    found = find_in_ledger(tmp_path, ledger, CauseName.MISSING_ALL_REDUCE, Kind.GRAD_INPUT)
    assert read(found).startswith("all_reduce (sum) over tp by DTensor at train.py:7 ran here")
    forward = find_in_ledger(tmp_path / "other", ledger, CauseName.MISSING_ALL_REDUCE, Kind.OUTPUT)
    assert read(forward) == "no reduction over tp ran in the forward of layers.1.fc2"


def test_a_reduction_over_other_ranks_is_quoted(tmp_path: Path) -> None:
    ledger = [make_collective(module="layers.1.fc2", axes=("dp",))]
    found = find_in_ledger(tmp_path, ledger, CauseName.WRONG_GROUP, Kind.OUTPUT)
    assert read(found) == "all_reduce (sum) over dp at train.py:7 ran here, but no reduction over tp"


def test_gradients_of_parameters_are_reduced_outside_of_modules(tmp_path: Path) -> None:
    ledger = [make_collective(phase=Phase.BACKWARD, axes=("dp",), issuer="DDP")]
    found = find_in_ledger(tmp_path, ledger, CauseName.MISSING_AVERAGE, Kind.PARAM_GRAD, "dp")
    assert found.ledger is not None
    assert found.ledger.fact is LedgerFact.RAN


def test_a_double_reduction_quotes_both(tmp_path: Path) -> None:
    ledger = [make_collective(module="layers.1.fc2", source=f"tp.py:{line}") for line in (3, 8, 3)]
    found = find_in_ledger(tmp_path, ledger, CauseName.DOUBLE_REDUCTION, Kind.OUTPUT)
    assert "at tp.py:3, and all_reduce (sum) over tp at tp.py:8 ran here" in read(found)
    nothing = find_in_ledger(tmp_path / "other", [make_collective()], CauseName.DOUBLE_REDUCTION, Kind.OUTPUT)
    assert nothing.ledger is None


@pytest.mark.parametrize("cause", [CauseName.MOVED, CauseName.ZEROS, CauseName.UNEXPLAINED])
def test_other_causes_quote_nothing(tmp_path: Path, cause: CauseName) -> None:
    assert find_in_ledger(tmp_path, [make_collective()], cause, Kind.OUTPUT).ledger is None


def test_without_a_ledger_nothing_is_said(tmp_path: Path) -> None:
    assert find_in_ledger(tmp_path, [], CauseName.MISSING_ALL_REDUCE, Kind.OUTPUT).ledger is None
