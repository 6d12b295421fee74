"""Facts in words and numbers, the same in every report: findings, reach, collectives, sizes and sources of layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttrace.judge.communication import LedgerEvidence, LedgerFact
from ttrace.judge.reason import HIDDEN, SETTINGS
from ttrace.judge.verdict import (
    FACTORS,
    UNEXAMINED,
    CauseName,
    Comparison,
    Exit,
    Finding,
    Judgement,
    Untested,
    Verdict,
    Weakness,
    WrongOperation,
)
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.trace.collectives import Collective

PASSED = "every tensor agrees with the reference within rounding error"
BUT_PROBLEMS = f"{PASSED}, but the run has problems"
SYMBOLS = {Exit.PASSED: "✓", Exit.FOUND: "✗", Exit.UNJUDGED: "?"}
_ALREADY_GROUPED = (CauseName.OPTIMIZER_SETTINGS, CauseName.MODULE_SETTINGS)
"""Causes of which each finding is a difference of its own."""
_ALONE = "wrong by itself: it is also wrong with generated inputs and gradients"
_ALL_ALONE = "also wrong when the inputs and gradients of all modules are generated"
_RIGHT_ALONE = "correct on generated inputs and gradients"


def group_alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings of one kind with one cause: reports describe one bug in many modules once."""
    groups: dict[tuple[str, str, str | None], list[Finding]] = {}
    for i, finding in enumerate(findings):
        cause = finding.cause
        is_alone = cause.name is CauseName.UNEXPLAINED and cause != UNEXAMINED
        key = str(i) if is_alone else cause.sentence if cause == UNEXAMINED else cause.name.value
        if cause.name in _ALREADY_GROUPED:
            key = cause.sentence
        groups.setdefault((key, finding.comparison.id.kind, cause.axis), []).append(finding)
    return list(groups.values())


def has_only_problems(judgement: Judgement) -> bool:
    """Return whether every tensor was judged and is right, so that only a problem keeps the run from passing."""
    is_open = any(c.spoils or c.verdict.is_wrong for c in judgement.comparisons)
    return bool(judgement.problems) and not is_open and judgement.count(Verdict.PASS) > 0


def make_headline(finding: Finding, *, first: bool) -> tuple[str, str]:
    """Return the site that is wrong, and the rest of the sentence about it."""
    comparison = finding.comparison
    when = f"step {comparison.id.step}"
    if comparison.id.microbatch is not None:
        when += f", microbatch {comparison.id.microbatch}"
    if comparison.reason in HIDDEN:
        what = "is set differently" if comparison.reason in SETTINGS else "was wrong before the step"
        return str(comparison.id.site), f"{what}  ({when})"
    what = "the first wrong tensor" if first else "wrong by itself too" if finding.alone else "wrong too"
    return str(comparison.id.site), f"is {what}  ({when})"


def list_facts(finding: Finding, others: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield what is known of a finding, each fact with its label; `others` are wrong in the same way."""
    comparison, cause = finding.comparison, finding.cause
    yield "cause", cause.sentence
    if comparison.reason not in HIDDEN:
        yield "error", _describe_error(comparison)
    for i, text in enumerate(cause.evidence):
        yield ("evidence" if i == 0 else ""), text
    if finding.ledger is not None:
        yield "ledger", _describe_ledger(finding.ledger, finding.module)
    if comparison.by:
        layout = f'"{comparison.layout}", ' if comparison.layout else ""
        yield "layout", f"{layout}{describe_provenance(comparison.by)}"
    if finding.source:
        yield "module", f"{finding.module}, {shorten_place(finding.source)}"
    if finding.operation is not None:
        yield "operation", describe_operation(finding.operation)
    if finding.alone is not None:
        alone = _ALL_ALONE if finding.covers else _ALONE
        yield "isolated", alone if finding.alone else f"{_RIGHT_ALONE}: {_explain_right(finding)}"
    if others:
        names = ", ".join(str(other.comparison.id.site) for other in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield "also", f"{names}{more} {'is' if len(others) == 1 else 'are'} wrong in the same way"
    if finding.num_after:
        after = "1 tensor after it is" if finding.num_after == 1 else f"{finding.num_after} tensors after it are"
        yield "then", f"{after} wrong"


def list_reach(judgement: Judgement) -> Iterator[tuple[str, str]]:
    """Yield what a check that passed could have found and what it could not, each with its label."""
    reach = judgement.reach
    if judgement.exit is not Exit.PASSED or reach is None:
        return
    updates = [name for name, weakness in reach.weak.items() if weakness is Weakness.NO_UPDATE]
    gradients = [name for name in reach.weak if name not in updates]
    if reach.error is not None:
        why = " or ".join(dict.fromkeys(WEAKNESSES[reach.weak[name]] for name in gradients))
        but = f", except in {_name_some(gradients)} ({why})" if gradients else ""
        yield "power", f"an error of {_format_percent(reach.error)} of any gradient's norm would have been found{but}"
    elif gradients:
        yield "power", f"no gradient was tested: {_name_some(gradients)} ({WEAKNESSES[Weakness.NO_GRADIENT]})"
    if updates:
        yield "", f"not tested: {_name_some(updates)} ({WEAKNESSES[Weakness.NO_UPDATE]})"
    if reach.untested:
        yield "untested", ", ".join(_UNTESTED[each] for each in reach.untested)


WEAKNESSES = {
    Weakness.NO_GRADIENT: "its gradient is zero but for rounding, or not judged",
    Weakness.NO_UPDATE: "its update is zero or not judged, so nothing tests the optimizer there",
    Weakness.WIDE_TOLERANCE: "the tolerance of its gradient is wide",
}
"""Why a fault in a parameter may pass."""
_UNTESTED = {
    Untested.LATER_STEPS: "later steps (one step was traced)",
    Untested.SCHEDULE: "the schedule of learning rates",
    Untested.LEARNING_RATE_ZERO: "updates (the learning rate is 0)",
    Untested.CLIPPING_NOT_REACHED: "clipping (the norm was below the threshold)",
    Untested.NO_CLIPPING: "clipping (none was seen)",
    Untested.IGNORED_LABELS: "ignored labels (the batch has no -100)",
    Untested.MASKS: "masks (all ones or all zeros)",
    Untested.DROPOUT: "dropout (switched off)",
    Untested.OWN_DATA: "the script's own data (replaced by generated values)",
}
_MOST_NAMED = 3


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def _format_percent(error: float) -> str:
    """Format a relative error in percent, rounded up to one digit: `0.0003%`."""
    if not error:
        return "0%"
    digits = -math.floor(math.log10(100 * error))
    return f"{math.ceil(100 * error * 10.0**digits) / 10.0**digits:.{max(digits, 0)}f}%"


def _describe_ledger(evidence: LedgerEvidence, module: str) -> str:
    """Describe what the ledger shows of a reduction that is missing or was done too often, judging by values."""
    over = f" over {evidence.axis}" if evidence.axis else ""
    ran = ", and ".join(quote_collective(one) for one in evidence.collectives)
    match evidence.fact:
        case LedgerFact.RAN:
            return f"{ran} ran here: on other values, or at another time, such as after clipping"
        case LedgerFact.TOO_OFTEN:
            return f"{ran} ran here"
        case LedgerFact.IN_SIBLING:
            return f"{evidence.collectives[0].module} has {ran} here, {module} has no reduction{over}"
        case LedgerFact.OTHER_GROUP:
            return f"{ran} ran here, but no reduction{over}"
        case LedgerFact.ABSENT:
            return f"no reduction{over} ran in the {evidence.phase.value} of {module}"


def describe_operation(operation: WrongOperation) -> str:
    """Describe which operation is wrong first, and where it is called."""
    if operation.collective is not None:
        what = str(operation.collective)
    else:
        what = f"the backward of {operation.name}" if operation.is_backward else operation.name
    if operation.is_left_out:
        return f"{what} at {shorten_place(operation.source)} takes other gradients, and not this one"
    caller = f", called at {shorten_place(operation.called_at)}" if operation.called_at else ""
    return f"{what} at {shorten_place(operation.source)}{caller}" if operation.source else what


def quote_collective(one: Collective) -> str:
    """Quote a line of the ledger: the operation, the ranks and the line of code."""
    issuer = f" by {one.issuer}" if one.issuer else ""
    return f"{one}{issuer} at {shorten_place(one.source)}" if one.source else f"{one}{issuer}"


def shorten_place(source: str, root: Path | None = None) -> str:
    """Return a place `file:line` as a path from `root`, or from the working folder, where it is inside of that."""
    root = root or Path.cwd()
    path = Path(source)
    return str(path.relative_to(root)) if path.is_relative_to(root) else source


def _explain_right(finding: Finding) -> str:
    if finding.cause.name in FACTORS:  # no input can cause or hide a factor
        return "the factor comes from outside this module"
    return "it is only wrong on the inputs of this run"


def _describe_error(comparison: Comparison) -> str:
    tolerance = comparison.tolerance
    assert tolerance is not None
    worst = max(comparison.error, comparison.replica_error)
    between = " between replicas" if comparison.replica_error > comparison.error else ""
    if comparison.num_different is not None:
        return f"differs{between} in {comparison.num_different} of {comparison.stats.count} elements"
    if comparison.verdict is Verdict.CONFLICT and worst <= tolerance.value:
        allowed = comparison.replica_tolerance
        words = f"which may differ by {allowed:.1e}" if allowed else "which must be equal, bit for bit"
        return f"{comparison.replica_error:.1e} between replicas, {words}"
    if worst <= tolerance.value:  # only its scale, or that of many together, is wrong
        return f"{worst:.1e}, within the tolerance {tolerance.value:.1e}; scale {comparison.stats.scale:.5g}"
    times = worst / tolerance.value if tolerance.value else math.inf
    return (
        f"{worst:.1e}{between}, {times:.1e} x the tolerance {tolerance.value:.1e} "
        f"(twins {tolerance.twin_error:.1e}, floor {tolerance.floor:.1e})"
    )


def keep_finite(value: float | None) -> float | None:
    """Return the value, or None where it is not finite, as JSON requires."""
    return value if value is not None and math.isfinite(value) else None


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes for people: `1.7 MB`."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"


_SENTENCES = {
    LayoutSource.DTENSOR: "DTensor",
    LayoutSource.DTENSOR_AND_SHAPES: "DTensor, and inferred from shapes",
    LayoutSource.SPMD_TYPES: "spmd_types",
    LayoutSource.HOLDS: "ttrace.holds",
    LayoutSource.HOLDS_OF_INPUT: "ttrace.holds of the input",
    LayoutSource.ROUTING: "the reference's routing",
    LayoutSource.RULE: "a rule",
    LayoutSource.ADAPTER: "the adapter",
    LayoutSource.DATA_PARALLEL: "data parallelism",
    LayoutSource.CONTEXT_PARALLEL: "context_parallel",
    LayoutSource.SINGLE_RANK: "single rank",
    LayoutSource.UNCUT_MESH: "no axis of this mesh cuts tensors",
    LayoutSource.UNKNOWN_TO_REFERENCE: "unknown to the reference",
    LayoutSource.FIRST_FORWARD: "the first forward",
    LayoutSource.RANKS: "rank by rank",
    LayoutSource.SHAPES: "inferred from shapes",
}


def describe_provenance(by: Provenance | None) -> str:
    """Describe what decided a layout; empty if nothing did."""
    if by is None:
        return ""
    return by.detail or _SENTENCES[by.source]
