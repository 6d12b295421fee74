"""Report of why one tensor was accused, or not, on one screen."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from ttrace.judge.explanation import Explanation, StatedLayout
from ttrace.judge.margin import MARGIN
from ttrace.judge.reason import describe
from ttrace.judge.verdict import Comparison, Tolerance, ToleranceRule, Verdict
from ttrace.report.facts import describe_provenance, keep_finite

_WIDTH = 11
_CLEAR = 1e-3
"""A scale that is off by less is shown by how far it is off."""
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.CONFLICT: "bold red"}
_RULES = {
    ToleranceRule.TWINS: "{margin:g} x the largest error of the twins",
    ToleranceRule.POOLED: "{margin:g} x the largest error of the twins over all small tensors of this kind",
    ToleranceRule.FLOOR: "{margin:g} x one rounding of the least precise dtype so far",
    ToleranceRule.SIBLINGS: "rounding of a gradient that is mathematically zero, relative to its siblings",
    ToleranceRule.NORM: "{margin:g} x the rounding of the norm of all gradients",
    ToleranceRule.UPDATE: "{margin:g} x the error of single elements of an update that rounding may move",
    ToleranceRule.SQUARES: "twice the tolerance of the gradient",
    ToleranceRule.NOISE: "{margin:g} x the difference between two runs of one side, added to the largest of the others",
    ToleranceRule.SCALE: "how far the scale may be from 1",
}


def as_json(explanation: Explanation) -> dict[str, Any]:
    comparison, finding = explanation.comparison, explanation.finding
    terms = comparison.tolerance.terms if comparison.tolerance else ()
    return {
        **_compare_as_json(comparison),
        "reason": describe(comparison.why),
        "reason_name": comparison.reason.value if comparison.reason else "",
        "scale": keep_finite(comparison.stats.scale),
        "replica_error": keep_finite(comparison.replica_error),
        "terms": [{"rule": term.rule.value, "value": keep_finite(term.value)} for term in terms],
        "layouts": [
            {"layout": stated.layout, "by": describe_provenance(stated.by), "ranks": list(stated.ranks)}
            for stated in explanation.layouts
        ],
        "before": [_compare_as_json(before) for before in explanation.before],
        "cause": finding.cause.name.value if finding else None,
        "sentence": finding.cause.sentence if finding else "",
        "first_finding": str(explanation.first_finding.comparison.id) if explanation.first_finding else None,
    }


def show(console: Console, explanation: Explanation, folder: str, margin: float = MARGIN) -> None:
    """Print the verdict and, line by line, what it is made of. `margin` is the one that the check used."""
    comparison = explanation.comparison
    verdict = Text(comparison.verdict, _STYLES.get(comparison.verdict, "bold yellow"))
    console.print(Text.assemble((str(comparison.id), "bold"), " is ", verdict), soft_wrap=True)
    for label, line in _list_lines(explanation, margin):
        console.print(Text.assemble((f"  {label:<{_WIDTH}}", "dim"), line), soft_wrap=True)
    console.print(Text.assemble(("next: ", "dim"), (_choose_next(explanation, folder), "bold")), soft_wrap=True)


def _list_lines(explanation: Explanation, margin: float) -> Iterator[tuple[str, str | Text]]:
    comparison = explanation.comparison
    if comparison.why is not None:
        yield "reason", describe(comparison.why)
    if comparison.tolerance is not None:
        yield "error", _describe_error(comparison, comparison.tolerance)
        yield from _list_terms(comparison.tolerance, margin)
        if math.isfinite(comparison.tolerance.scale):
            yield "scale", _describe_scale(comparison, comparison.tolerance)
    for i, stated in enumerate(explanation.layouts):
        yield ("layout" if i == 0 else ""), _describe_layout(stated)
    for i, before in enumerate(explanation.before):
        yield ("before it" if i == 0 else ""), _describe_neighbour(before)
    if explanation.finding is not None:
        yield "cause", explanation.finding.cause.sentence
        for i, text in enumerate(explanation.finding.cause.evidence):
            yield ("evidence" if i == 0 else ""), text
    elif comparison.verdict.is_wrong and explanation.first_finding is not None:
        first = explanation.first_finding
        yield "finding", f"none of its own; the first finding is {first.comparison.id}: {first.cause.sentence}"


def _describe_error(comparison: Comparison, tolerance: Tolerance) -> str:
    if comparison.num_different is not None:
        return f"{comparison.num_different} of {comparison.stats.count} elements differ; they must be equal"
    words = f"{comparison.error:.2e}"
    if tolerance.size:
        words += " of its siblings' size"
    if comparison.replica_error:
        words += f"; {comparison.replica_error:.2e} between replicas, which may differ by "
        words += f"{comparison.replica_tolerance:.2e}"
    return words


def _describe_scale(comparison: Comparison, tolerance: Tolerance) -> str:
    off = comparison.stats.scale - 1
    scale = f"{1 + off:.4g}" if abs(off) >= _CLEAR else f"(1 {off:+.1e})"
    return f"best fit: candidate = {scale} x reference; it may differ from 1 by {tolerance.scale:.1e}"


def _list_terms(tolerance: Tolerance, margin: float) -> Iterator[tuple[str, str]]:
    """The tolerance, then each term; the one that gave it is marked."""
    yield "tolerance", f"{tolerance.value:.2e}" if tolerance.terms else "0: integers must be equal"
    for term in tolerance.terms:
        if term.rule is ToleranceRule.SCALE:
            continue  # another limit, which has a line of its own
        mark = "  <- decides" if term == tolerance.decisive else ""
        yield "", f"  {term.rule.value:<9}{term.value:.2e}  {_RULES[term.rule].format(margin=margin)}{mark}"


def _describe_layout(stated: StatedLayout) -> str:
    who = describe_provenance(stated.by) or "nobody"
    layout = f'"{stated.layout}", ' if stated.layout else ""
    ranks = "" if stated.is_everywhere else f" (rank {', '.join(map(str, stated.ranks))})"
    return f"{layout}decided by: {who}{ranks}"


def _describe_neighbour(comparison: Comparison) -> Text:
    verdict = (f"{comparison.verdict:<9}", _STYLES.get(comparison.verdict, "yellow"))
    excess = "" if math.isnan(comparison.excess) else f"  {comparison.excess:.2g} x its tolerance"
    return Text.assemble(verdict, str(comparison.id), (excess, "dim"))


def _choose_next(explanation: Explanation, folder: str) -> str:
    """Choose what shows more: the first finding if another one speaks for this tensor, else its shards."""
    comparison, first = explanation.comparison, explanation.first_finding
    command, tensor_id = "show", comparison.id
    if comparison.verdict.is_wrong and explanation.finding is None and first is not None:
        command, tensor_id = "explain", first.comparison.id
    return f"ttrace {command} {shlex.quote(folder)} {shlex.quote(str(tensor_id))}"


def _compare_as_json(comparison: Comparison) -> dict[str, Any]:
    tolerance = comparison.tolerance
    return {
        "id": str(comparison.id),
        "verdict": comparison.verdict.value,
        "error": keep_finite(comparison.error) if tolerance else None,
        "tolerance": keep_finite(tolerance.value) if tolerance else None,
    }
