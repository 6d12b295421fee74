"""Common causes: one finding for all gradients that are wrong for one cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ttrace.judge.causes.evidence import MOST_TOLERANCES
from ttrace.judge.verdict import FACTORS, UNEXAMINED, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import Kind, TensorId

_GRADIENTS = (Kind.PARAM_GRAD, Kind.MAIN_GRAD)
_AFTERWARDS = (Kind.GRAD_NORM, Kind.CLIP, Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM, Kind.CALL, Kind.CALL_GRAD)
_WHERE = "activation gradients are right: look at how parameter gradients are accumulated, reduced and scaled"


def merge_gradients(findings: Sequence[Finding], comparisons: Sequence[Comparison]) -> tuple[Finding, ...]:
    """Merge the findings of single parameters if all gradients are wrong for the same cause.

    Such a cause is not in a module: it comes after the backward. The first finding stays at its place; it no longer
    names the module's source.
    """
    accused = [finding for finding in findings if finding.comparison.id.kind in _GRADIENTS]
    causes = {(f.cause.name, f.cause.axis) for f in accused if f.cause is not UNEXAMINED}
    if len(accused) < 2 or len(causes) > 1:
        return tuple(findings)
    first = accused[0]
    wrong = _find_all_wrong(first.comparison.id, comparisons)
    if wrong is None or (first.cause.name in FACTORS and not _have_one_factor(wrong)):
        return tuple(findings)
    count = len({c.id.name for c in wrong})
    words = f"in all {count} parameter gradients {first.cause.sentence}"
    if first.cause.name is CauseName.UNEXPLAINED:
        words = f"all {count} parameter gradients are wrong, and {first.cause.sentence}"
    evidence = (*first.cause.evidence, _WHERE)
    covers = frozenset(c.id for c in wrong if c.id != first.comparison.id)
    cause = replace(first.cause, sentence=words, evidence=evidence)
    merged = replace(first, source="", cause=cause, covers=covers)
    others = {finding.comparison.id for finding in accused[1:]}
    return tuple(merged if finding is first else finding for finding in findings if finding.comparison.id not in others)


def _find_all_wrong(first: TensorId, comparisons: Sequence[Comparison]) -> list[Comparison] | None:
    """All wrong gradients of the step; None if a final gradient is right, or something is wrong before them."""
    then = [c for c in comparisons if c.id.step == first.step and c.id.kind not in _AFTERWARDS]
    if any(c.verdict.is_wrong and c.id.kind not in _GRADIENTS for c in then):
        return None
    here = [c for c in then if c.id.kind is first.kind]
    if any(c.verdict is Verdict.PASS and c.id.microbatch is None and c.stats.aa > 0.0 for c in here):
        return None
    return [c for c in here if c.verdict.is_wrong]


def _have_one_factor(wrong: Sequence[Comparison]) -> bool:
    """Whether one number times the reference explains all of them."""
    factor = wrong[0].stats.scale
    return all(_measure_rest(c, factor) <= MOST_TOLERANCES * _tolerance(c) * max(abs(factor), 1.0) for c in wrong)


def _measure_rest(comparison: Comparison, factor: float) -> float:
    """The error that is left against this many times the reference."""
    s = comparison.stats
    return math.sqrt(max(s.bb - 2 * factor * s.ab + factor * factor * s.aa, 0.0) / s.aa) if s.aa else math.inf


def _tolerance(comparison: Comparison) -> float:
    return comparison.tolerance.value if comparison.tolerance is not None else 0.0
