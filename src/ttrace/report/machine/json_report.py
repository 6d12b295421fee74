"""JSON report of a judgement, for programs.

docs/reference/report.schema.json is generated from its types; tests/report/machine/test_schema.py compares them.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic reads the standard library's only from Python 3.12 on

from ttrace.judge.communication import LedgerEvidence, LedgerFact
from ttrace.judge.reason import Reason, describe
from ttrace.judge.verdict import (
    CauseName,
    Comparison,
    Finding,
    Judgement,
    Reach,
    Untested,
    Verdict,
    Weakness,
    WrongOperation,
)
from ttrace.report.facts import describe_provenance, keep_finite
from ttrace.report.refusal import SCHEMA
from ttrace.trace.collectives import Collective

_CLOSED = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@with_config(_CLOSED)
class CollectiveReport(TypedDict):
    """One collective, as a rank issued it."""

    operation: str
    reduction: str
    """How it reduces, for instance sum; empty if that is not known."""
    over: str
    """Mesh axes, for instance dp+cp, or ranks."""
    module: str
    phase: str
    source: str
    """File and line of the caller."""
    issuer: str
    """The part of torch that issued it; empty if the caller did."""


@with_config(_CLOSED)
class LedgerReport(TypedDict):
    """What the ledger of collectives shows."""

    fact: Annotated[str, Field(json_schema_extra={"enum": [fact.value for fact in LedgerFact]})]
    axis: str
    collectives: list[CollectiveReport]


@with_config(_CLOSED)
class OperationReport(TypedDict):
    """An operation that makes something wrong of right inputs."""

    name: str
    source: str
    """File and line of its caller; of a custom backward, its own."""
    called_at: str
    """For a custom backward, file and line of the call of its function; empty otherwise."""
    backward: bool
    """Whether its backward is wrong."""
    left_out: bool
    """Whether it is a collective that reduces other gradients, and not this one."""
    collective: CollectiveReport | None


@with_config(_CLOSED)
class FindingReport(TypedDict):
    """Where something starts to be wrong."""

    id: str
    """step/microbatch/name/kind of the first wrong tensor."""
    module: str
    kind: str
    source: str
    """File and line of the module's class; empty if it is not known."""
    cause: Annotated[str, Field(json_schema_extra={"enum": [name.value for name in CauseName]})]
    """One of a closed set of names, see docs/reference/commands.md."""
    sentence: str
    axis: str | None
    evidence: list[str]
    ledger: LedgerReport | None
    """What the ledger of collectives shows of the reduction that the cause names; null if it names none."""
    error: float | None
    tolerance: float | None
    num_after: int
    """How many wrong tensors follow."""
    alone: bool | None
    """Whether the module is wrong by itself, on generated inputs; null if the isolated run did not judge its tensor."""
    operation: OperationReport | None
    """The first wrong operation in the module's own code; null if it is not known."""


@with_config(_CLOSED)
class TensorReport(TypedDict):
    """One logical tensor, measured."""

    id: str
    verdict: Verdict
    reason: str
    reason_name: Annotated[str, Field(json_schema_extra={"enum": ["", *(reason.value for reason in Reason)]})]
    """The reason without its numbers: one of a closed set of names; empty where there is none."""
    error: float | None
    scale: float | None
    tolerance: float | None
    twin_error: float | None
    replica_error: float | None
    layout: str
    by: str
    """Who decided the layout."""


@with_config(_CLOSED)
class ReachReport(TypedDict):
    """What the check could have found, and what it could not."""

    error: float | None
    """An error of this size, relative to the gradient, would have been found in each parameter that is not weak."""
    weak: dict[str, Annotated[str, Field(json_schema_extra={"enum": [weakness.value for weakness in Weakness]})]]
    """The trained parameters in which a fault may pass, and why."""
    untested: list[Annotated[str, Field(json_schema_extra={"enum": [each.value for each in Untested]})]]
    """What the run could have tested, and did not."""


@with_config(_CLOSED)
class Report(TypedDict):
    """A judgement; numbers that JSON cannot hold are null."""

    schema: int
    exit: int
    """0: every tensor agrees; 1: there are findings; 2: something could not be judged."""
    counts: dict[str, int]
    """How many tensors got each verdict."""
    findings: list[FindingReport]
    """The first one first; those after it mostly follow from it."""
    problems: list[str]
    """What keeps the whole from being judged."""
    notes: list[str]
    reach: ReachReport | None
    """What the check could have found; null if that was not measured."""
    next: str
    """What to type next."""
    tensors: list[TensorReport]


def build_schema() -> dict[str, Any]:
    """Build the JSON schema of a report."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **TypeAdapter(Report).json_schema(mode="serialization"),
    }


def as_json(judgement: Judgement, next_command: str) -> Report:
    """Return the whole judgement; numbers that JSON cannot hold become null."""
    return {
        "schema": SCHEMA,
        "exit": int(judgement.exit),
        "counts": {verdict.value: judgement.count(verdict) for verdict in Verdict},
        "findings": [_report_finding(finding) for finding in judgement.findings],
        "problems": list(judgement.problems),
        "notes": list(judgement.notes),
        "reach": _report_reach(judgement.reach),
        "next": next_command,
        "tensors": [_report_tensor(comparison) for comparison in judgement.comparisons],
    }


def format_text(report: Report) -> str:
    """Write a report as text, each tensor on a line: indenting hundreds of thousands of them takes a while."""
    parts = [f'"{key}": {json.dumps(value, indent=1)}' for key, value in report.items() if key != "tensors"]
    tensors = ",\n".join(map(json.dumps, report["tensors"]))
    return "{\n" + ",\n".join([*parts, f'"tensors": [\n{tensors}\n]']) + "\n}"


def _report_reach(reach: Reach | None) -> ReachReport | None:
    if reach is None:
        return None
    return {
        "error": keep_finite(reach.error),
        "weak": {name: weakness.value for name, weakness in reach.weak.items()},
        "untested": [each.value for each in reach.untested],
    }


def _report_finding(finding: Finding) -> FindingReport:
    return {
        "id": str(finding.comparison.id),
        "module": finding.module,
        "kind": finding.comparison.id.kind.value,
        "source": finding.source,
        "cause": finding.cause.name.value,
        "sentence": finding.cause.sentence,
        "axis": finding.cause.axis,
        "evidence": list(finding.cause.evidence),
        "ledger": _report_ledger(finding.ledger),
        "error": keep_finite(finding.comparison.error),
        "tolerance": keep_finite(finding.comparison.tolerance.value if finding.comparison.tolerance else math.nan),
        "num_after": finding.num_after,
        "alone": finding.alone,
        "operation": _report_operation(finding.operation),
    }


def _report_ledger(evidence: LedgerEvidence | None) -> LedgerReport | None:
    if evidence is None:
        return None
    return {
        "fact": evidence.fact.value,
        "axis": evidence.axis,
        "collectives": [_report_collective(one) for one in evidence.collectives],
    }


def _report_collective(one: Collective) -> CollectiveReport:
    return {
        "operation": one.op,
        "reduction": one.reduction,
        "over": str(one.group),
        "module": one.module,
        "phase": one.phase.value,
        "source": one.source,
        "issuer": one.issuer,
    }


def _report_operation(operation: WrongOperation | None) -> OperationReport | None:
    if operation is None:
        return None
    return {
        "name": operation.name,
        "source": operation.source,
        "called_at": operation.called_at,
        "backward": operation.is_backward,
        "left_out": operation.is_left_out,
        "collective": None if operation.collective is None else _report_collective(operation.collective),
    }


def _report_tensor(comparison: Comparison) -> TensorReport:
    tolerance = comparison.tolerance
    return {
        "id": str(comparison.id),
        "verdict": comparison.verdict,
        "reason": describe(comparison.why),
        "reason_name": comparison.reason.value if comparison.reason else "",
        "error": keep_finite(comparison.error),
        "scale": keep_finite(comparison.stats.scale),
        "tolerance": keep_finite(tolerance.value) if tolerance else None,
        "twin_error": keep_finite(tolerance.twin_error) if tolerance else None,
        "replica_error": keep_finite(comparison.replica_error),
        "layout": comparison.layout,
        "by": describe_provenance(comparison.by),
    }
