"""Combination of an ordinary and an isolated judgement: which modules are wrong by themselves.

In the ordinary run everything after the first wrong tensor is wrong too, so the first fault hides a second one. The
isolated run judges each module alone, but with generated inputs. A module is accused if both runs agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from enum import Enum, auto

from ttrace.judge.reason import Reason, Why
from ttrace.judge.sentences import describe
from ttrace.judge.verdict import CauseName, Finding, Judgement, Verdict, WrongOperation
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.collectives import Phase


class _Pass(Enum):
    """The part of a step in which a tensor is made."""

    FORWARD = auto()
    BACKWARD = auto()
    UPDATE = auto()


_BEFORE = (Kind.PARAM, Kind.BUFFER)
"""What no operation of the step makes."""
_MISSING = frozenset({CauseName.MISSING_AVERAGE, CauseName.MISSING_ALL_REDUCE})
_AFTER = _MISSING | frozenset(
    {
        CauseName.DOUBLE_REDUCTION,
        CauseName.CONSTANT_FACTOR,
        CauseName.MICROBATCHES,
        CauseName.OTHERS_VALUES,
        CauseName.TIED_COPIES,
    }
)
"""What goes wrong with a parameter's gradient after the module's own backward, unless that is custom."""


def combine(ordinary: Judgement, isolated: Judgement) -> Judgement:
    """Add to the ordinary findings whether each module is wrong by itself, and the findings that they hid."""
    wrong = {comparison.id for comparison in ordinary.comparisons if comparison.verdict.is_wrong}
    accused = {finding.module for finding in ordinary.findings}
    covered = {tensor_id for finding in ordinary.findings for tensor_id in finding.covers}
    verdicts = {comparison.id: comparison.verdict for comparison in isolated.comparisons}
    blamed = {(finding.module, _find_pass(finding.comparison.id.kind)) for finding in isolated.findings}
    known = [replace(finding, alone=_is_wrong_alone(finding, verdicts, blamed)) for finding in ordinary.findings]
    unexplained = wrong - covered
    hidden: dict[str, Finding] = {}
    for finding in isolated.findings:
        if finding.module not in accused and finding.comparison.id in unexplained:
            hidden.setdefault(finding.module, replace(finding, alone=True))
    found = (*_sort_by_evidence(known), *hidden.values())
    findings = tuple(replace(finding, operation=_find_operation(finding, isolated)) for finding in found)
    return replace(ordinary, findings=findings, notes=(*ordinary.notes, *_note_isolated(isolated)))


def _is_wrong_alone(
    finding: Finding, verdicts: Mapping[TensorId, Verdict], blamed: Set[tuple[str, _Pass]]
) -> bool | None:
    """Whether the module is wrong in isolation in the same pass; None where this tensor was not judged there."""
    own = finding.comparison.id
    verdict = verdicts.get(own)
    if verdict is None or not (verdict is Verdict.PASS or verdict.is_wrong):
        return None
    return verdict.is_wrong or (finding.module, _find_pass(own.kind)) in blamed


def _find_pass(kind: Kind) -> _Pass:
    if kind in (Kind.GRAD_NORM, Kind.CLIP, Kind.PARAM_AFTER, Kind.UPDATE, Kind.OPTIM):
        return _Pass.UPDATE
    return _Pass.BACKWARD if kind.is_backward else _Pass.FORWARD


def _sort_by_evidence(findings: list[Finding]) -> list[Finding]:
    """What is wrong by itself comes first; otherwise in the order in which it appeared."""
    return sorted(findings, key=lambda finding: not finding.alone)


def _find_operation(finding: Finding, isolated: Judgement) -> WrongOperation | None:
    """Find what the script did last to a wrong gradient, or the first wrong operation of the finding's module."""
    own = finding.comparison.id
    phases = {_Pass.FORWARD: Phase.FORWARD, _Pass.BACKWARD: Phase.BACKWARD}
    phase = phases.get(_find_pass(own.kind))
    if phase is None or own.kind in _BEFORE:
        return None
    found, cause = isolated.operations, finding.cause.name
    in_module = found.in_modules.get((finding.module, phase))
    if own.kind is not Kind.PARAM_GRAD:
        return in_module
    is_custom = in_module is not None and bool(in_module.called_at)
    by_script = (found.left_out.get(own.name) if cause in _MISSING else None) or found.changes.get(own.name)
    return by_script or (in_module if is_custom or cause not in _AFTER else None)


def _note_isolated(isolated: Judgement) -> list[str]:
    unjudged = sum(comparison.spoils for comparison in isolated.comparisons)
    words = [f"{unjudged} tensors of the isolated run could not be judged"] if unjudged else []
    passed = sum(comparison.reason is Reason.SKIPPED_BLOCK for comparison in isolated.comparisons)
    why = describe(Why(Reason.SKIPPED_BLOCK))
    words += [f"{passed} tensors were not judged in isolation: {why}"] if passed else []
    return [*words, *(f"isolated: {problem}" for problem in isolated.problems)]
