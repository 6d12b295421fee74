"""Differences that compared values do not show: settings, and what generated values replaced.

Each stands for a tensor, which fails: an update, the output of a module, a parameter, a gradient. Many tensors with one
difference are one finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ttrace.judge.findings.initial_values import describe_replaced, find_replaced_values
from ttrace.judge.findings.origins import find_source
from ttrace.judge.findings.settings import describe_difference, find_settings
from ttrace.judge.reason import HIDDEN, SETTINGS, Reason, Why
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, HiddenDifference, Verdict
from ttrace.layouts.ids import ROOT, Kind, TensorId
from ttrace.trace.reader import Trace

_NOT_SHOWN = "the values of this step do not show it"
_REPLACED = "generated values have replaced it, so the compared values do not show it"


def find_hidden(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[HiddenDifference]:
    """Find all of them, whether or not the values of the tensors are wrong too."""
    if reference.manifest.isolated:
        return []  # the ordinary run shows the same
    by_id = {comparison.id: comparison for comparison in comparisons}
    return [
        *find_settings(by_id, reference, candidate),
        *find_replaced_values(by_id, reference, candidate),
    ]


def mark_hidden(comparisons: Sequence[Comparison], hidden: Sequence[HiddenDifference]) -> list[Comparison]:
    """Fail the tensors that stand for them, unless their values are wrong already."""
    whys = dict(reversed(hidden))  # the first reason of each
    known = {comparison.id for comparison in comparisons}
    added = [Comparison(own, Verdict.FAIL, why) for own, why in whys.items() if own not in known]
    return [*(_mark(comparison, whys) for comparison in comparisons), *added]


def add_hidden(
    findings: Sequence[Finding],
    comparisons: Sequence[Comparison],
    hidden: Sequence[HiddenDifference],
    candidate: Trace,
) -> tuple[Finding, ...]:
    """Add one finding for each difference, whatever the number of tensors; findings that it explains become it."""
    wrong = {comparison.id: comparison for comparison in comparisons if comparison.verdict.is_wrong}
    groups: dict[tuple[Kind, Why], list[Comparison]] = {}
    for own, why in hidden:
        groups.setdefault((own.kind, why), []).append(wrong[own])
    result = list(findings)
    for (_, why), group in groups.items():
        ids = [comparison.id for comparison in group]
        alike = [finding for finding in result if _is_explained(finding, why, ids)]
        first = alike[0].comparison if alike else next((c for c in group if c.reason in HIDDEN), None)
        if first is None:
            continue  # their values are wrong for another cause, which is reported
        cause = _describe(why, ids, candidate)
        covers = frozenset(own for own in ids if own != first.id)
        if alike:
            merged = replace(alike[0], cause=cause, covers=covers | alike[0].covers)
            result = [merged if f is alike[0] else f for f in result if f is alike[0] or f not in alike]
        else:
            module = first.id.name if first.id.kind is Kind.OUTPUT else first.id.name.rpartition(".")[0] or ROOT
            evidence = _NOT_SHOWN if why.reason in SETTINGS else _REPLACED
            own_cause = replace(cause, evidence=(evidence,))
            result.append(Finding(first, module, find_source(module, candidate), own_cause, num_after=0, covers=covers))
    return tuple(result)


def _mark(comparison: Comparison, whys: Mapping[TensorId, Why]) -> Comparison:
    if comparison.id not in whys or comparison.verdict.is_wrong:
        return comparison
    return replace(comparison, verdict=Verdict.FAIL, why=whys[comparison.id])


def _is_explained(finding: Finding, why: Why, ids: Sequence[TensorId]) -> bool:
    """Whether this difference of these tensors explains a finding."""
    if why.reason is Reason.STALE_GRADIENT:
        return finding.comparison.id in ids
    names = [own.name for own in ids]
    if why.reason not in SETTINGS:
        return False
    if finding.cause.name is CauseName.OPTIMIZER_SETTINGS:
        return finding.comparison.id.name in names
    return finding.module in names and not finding.comparison.id.kind.is_of_param


def _describe(why: Why, ids: Sequence[TensorId], candidate: Trace) -> Cause:
    return describe_difference(why, ids, candidate) if why.reason in SETTINGS else describe_replaced(why, ids)
