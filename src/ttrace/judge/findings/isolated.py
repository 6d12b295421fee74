"""Combination of an ordinary and an isolated judgement: which modules are wrong by themselves.

In the ordinary run everything after the first wrong tensor is wrong too, so the first bug hides a second one. The
isolated run judges each module alone, but on generated inputs. A module is accused if both runs agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from ttrace.judge.reason import HIDDEN, Reason, Why, describe
from ttrace.judge.verdict import CauseName, Finding, Judgement, Verdict, WrongOperation
from ttrace.layouts.ids import Kind, Phase, TensorId

_BEFORE = (Kind.PARAM, Kind.BUFFER)
"""The kinds that no operation of the step makes."""
_MISSING_REDUCTIONS = frozenset({CauseName.MISSING_AVERAGE, CauseName.MISSING_ALL_REDUCE})
_AFTER_BACKWARD = _MISSING_REDUCTIONS | frozenset(
    {
        CauseName.DOUBLE_REDUCTION,
        CauseName.CONSTANT_FACTOR,
        CauseName.MICROBATCHES,
        CauseName.OTHERS_VALUES,
        CauseName.TIED_COPIES,
    }
)
"""Causes that arise after the module's own backward, unless a custom autograd function reduces in it."""


def combine(ordinary: Judgement, isolated: Judgement) -> Judgement:
    """Add to the ordinary findings whether each module is wrong by itself, and the findings that were hidden."""
    wrong = {comparison.id for comparison in ordinary.comparisons if comparison.verdict.is_wrong}
    accused = {finding.module for finding in ordinary.findings}
    covered = {tensor_id for finding in ordinary.findings for tensor_id in finding.covers}
    verdicts = {comparison.id: comparison.verdict for comparison in isolated.comparisons}
    blamed = {(finding.module, finding.comparison.id.kind.phase) for finding in isolated.findings}
    visible = [replace(finding, alone=_is_wrong_alone(finding, verdicts, blamed)) for finding in ordinary.findings]
    unexplained = wrong - covered
    hidden: dict[str, Finding] = {}
    for finding in isolated.findings:
        if finding.module not in accused and finding.comparison.id in unexplained:
            hidden.setdefault(finding.module, replace(finding, alone=True))
    # What is wrong by itself comes first; sorting keeps the order of appearance otherwise.
    ordered = (*sorted(visible, key=lambda finding: not finding.alone), *hidden.values())
    findings = tuple(replace(finding, operation=_find_operation(finding, isolated)) for finding in ordered)
    return replace(ordinary, findings=findings, notes=(*ordinary.notes, *_note_isolated(isolated)))


def _is_wrong_alone(
    finding: Finding, verdicts: Mapping[TensorId, Verdict], blamed: Set[tuple[str, Phase]]
) -> bool | None:
    """Whether the module is wrong in isolation in the same phase; None if this tensor was not judged there."""
    own = finding.comparison.id
    verdict = verdicts.get(own)
    if finding.comparison.reason in HIDDEN or verdict is None or not (verdict is Verdict.PASS or verdict.is_wrong):
        return None
    return verdict.is_wrong or (finding.module, own.kind.phase) in blamed


def _find_operation(finding: Finding, isolated: Judgement) -> WrongOperation | None:
    """Find the script's last change of a wrong gradient, or the first wrong operation of the finding's module."""
    own = finding.comparison.id
    if own.kind.phase is Phase.OPTIMIZER or own.kind in _BEFORE:
        return None
    operations, cause = isolated.operations, finding.cause.name
    in_module = operations.in_modules.get((finding.module, own.kind.phase))
    if own.kind is not Kind.PARAM_GRAD:
        return in_module
    is_custom = in_module is not None and bool(in_module.called_at)
    by_script = (operations.left_out.get(own.name) if cause in _MISSING_REDUCTIONS else None) or operations.changes.get(
        own.name
    )
    return by_script or (in_module if is_custom or cause not in _AFTER_BACKWARD else None)


def _note_isolated(isolated: Judgement) -> list[str]:
    num_unjudged = sum(comparison.spoils for comparison in isolated.comparisons)
    num_skipped = sum(comparison.reason is Reason.SKIPPED_BLOCK for comparison in isolated.comparisons)
    why = describe(Why(Reason.SKIPPED_BLOCK))
    return [
        *([f"{num_unjudged} tensors of the isolated run could not be judged"] if num_unjudged else []),
        *([f"{num_skipped} tensors were not judged in isolation: {why}"] if num_skipped else []),
        *(f"isolated: {problem}" for problem in isolated.problems),
    ]
