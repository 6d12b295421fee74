"""What the ledger of collectives says of a finding that speaks of a missing, double or misdirected reduction."""

from __future__ import annotations

from dataclasses import replace

from ttrace.judge.communication import REDUCTIONS, Communication, LedgerEvidence, LedgerFact
from ttrace.judge.verdict import CauseName, Finding
from ttrace.layouts.ids import Kind
from ttrace.trace.collectives import Collective, Phase

_MISSING = (
    CauseName.MISSING_ALL_REDUCE,
    CauseName.MISSING_AVERAGE,
    CauseName.WRONG_GROUP,
    CauseName.PARTIAL_SUM,
)
_MOST_QUOTED = 2


def add_ledger(finding: Finding, communication: Communication) -> Finding:
    """Add what the ledger says of the reduction that a finding speaks of, if it speaks of one."""
    cause = finding.cause
    is_missing, is_double = cause.name in _MISSING, cause.name is CauseName.DOUBLE_REDUCTION
    if communication.is_empty or not (is_missing or is_double):
        return finding
    evidence = _look_up(finding, communication)
    if is_double:
        if evidence.fact is not LedgerFact.RAN:
            return finding  # what is not there was not done twice
        evidence = replace(evidence, fact=LedgerFact.TOO_OFTEN)
    return replace(finding, ledger=evidence)


def _look_up(finding: Finding, communication: Communication) -> LedgerEvidence:
    kind, axis, module = finding.comparison.id.kind, finding.cause.axis or "", finding.module
    phase = Phase.BACKWARD if kind.is_backward or kind.is_of_param else Phase.FORWARD
    own = _keep_reductions(communication.list_inside(module, phase))
    if kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD):
        own += _keep_reductions(communication.list_outside((Phase.BACKWARD, Phase.OTHER)))
    over = [one for one in own if axis in one.group.axes or not axis]
    if over:
        return LedgerEvidence(LedgerFact.RAN, phase, axis, _keep_distinct(over))
    for name in communication.list_siblings(module):
        there = _keep_reductions(communication.list_inside(name, phase)) if name != module else []
        over = [one for one in there if axis in one.group.axes]
        if over:
            return LedgerEvidence(LedgerFact.IN_SIBLING, phase, axis, _keep_distinct(over))
    if own:
        return LedgerEvidence(LedgerFact.OTHER_GROUP, phase, axis, _keep_distinct(own))
    return LedgerEvidence(LedgerFact.ABSENT, phase, axis)


def _keep_reductions(found: list[Collective]) -> list[Collective]:
    return [one for one in found if one.op in REDUCTIONS]


def _keep_distinct(found: list[Collective]) -> tuple[Collective, ...]:
    """Keep the first of those that come from one line of code and do the same."""
    lines: dict[tuple[object, ...], Collective] = {}
    for one in found:
        lines.setdefault((one.op, one.group, one.source), one)
    return tuple(lines.values())[:_MOST_QUOTED]
