"""This module tells a judgement in a terminal: the first divergence first, the next command last."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttrace.judge.verdict import UNEXPLAINED, Comparison, Exit, Finding, Judgement, Verdict

_MOST_SHOWN = 5
_INDENT = 12
_ALONE = {
    True: "wrong by itself: also where its inputs and incoming gradients are generated",
    False: "right on generated inputs and gradients: it takes the real ones to go wrong",
}


def show(console: Console, judgement: Judgement, next_command: str) -> None:
    """Print the whole judgement."""
    parts: list[RenderableType] = []
    alike = _alike(judgement.findings)
    for i, (finding, *others) in enumerate(alike[:_MOST_SHOWN]):
        parts += [_headline(finding, first=i == 0), *_details(finding, others, console.width)]
    if len(alike) > _MOST_SHOWN:
        parts.append(Text(f"... and {len(alike) - _MOST_SHOWN} further findings", "dim"))
    parts += _unjudged(judgement)
    if judgement.exit is Exit.PASSED:
        parts.append(Text("✓ every tensor agrees with the reference as far as rounding allows", "bold green"))
    parts.append(_counts(judgement))
    parts += [Text(f"note: {note}", "dim") for note in judgement.notes]
    parts.append(Text.assemble(("next: ", "dim"), (next_command, "bold")))
    console.print(Group(*parts), soft_wrap=True)


def _headline(finding: Finding, *, first: bool) -> Text:
    comparison = finding.comparison
    when = f"step {comparison.id.step}"
    if comparison.id.microbatch is not None:
        when += f", microbatch {comparison.id.microbatch}"
    what = "the first wrong tensor" if first else "wrong by itself too"
    return Text.assemble(("✗ ", "bold red"), (str(comparison.id.site), "bold red"), f" is {what}  ({when})")


def _alike(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    """Findings of one kind with one cause, together: one bug in many modules is told once."""
    groups: dict[tuple[str, str, str | None], list[Finding]] = {}
    for i, finding in enumerate(findings):
        cause = finding.cause
        key = str(i) if cause.name == UNEXPLAINED else cause.name
        groups.setdefault((key, finding.comparison.id.kind, cause.axis), []).append(finding)
    return list(groups.values())


def _details(finding: Finding, others: list[Finding], width: int) -> list[RenderableType]:
    """What is known of a finding, in lines of this width: no table, which would fill them up with blanks."""
    lines: list[RenderableType] = []
    for label, text in _facts(finding, others):
        wrapped = textwrap.wrap(text, max(width - _INDENT, 40), break_long_words=False, break_on_hyphens=False)
        for i, part in enumerate(wrapped):
            head = f"  {label if i == 0 else '':<{_INDENT - 4}}  "
            lines.append(Text.assemble((head, "dim"), (part, "bold" if label == "cause" else "")))
    return [*lines, Text()]


def _facts(finding: Finding, others: list[Finding]) -> Iterator[tuple[str, str]]:
    comparison, cause = finding.comparison, finding.cause
    yield "cause", cause.sentence
    yield "error", _error(comparison)
    for i, text in enumerate(cause.evidence):
        yield ("evidence" if i == 0 else ""), text
    if comparison.by:
        layout = f'"{comparison.layout}", ' if comparison.layout else ""
        yield "layout", f"{layout}{comparison.by}"
    if finding.source:
        yield "module", f"{finding.module}, {finding.source}"
    if finding.inside:
        yield "inside", f"the first wrong result in its own code is that of {finding.inside}"
    if finding.alone is not None:
        yield "isolated", _ALONE[finding.alone]
    if others:
        named = ", ".join(str(other.comparison.id.site) for other in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield "also", f"{named}{more}, in the same way"
    if finding.num_after:
        after = "1 tensor after it is" if finding.num_after == 1 else f"{finding.num_after} tensors after it are"
        yield "then", f"{after} wrong"


def _error(comparison: Comparison) -> str:
    tolerance = comparison.tolerance
    assert tolerance is not None
    worst = max(comparison.error, comparison.replica_error)
    between = " between replicas" if comparison.replica_error > comparison.error else ""
    if worst <= tolerance.value:  # only its scale, or that of many together, is wrong
        return f"{worst:.1e}, within the tolerance {tolerance.value:.1e}; scale {comparison.stats.scale:.5g}"
    times = worst / tolerance.value if tolerance.value else math.inf
    return (
        f"{worst:.1e}{between}, {times:.1e} x the tolerance {tolerance.value:.1e} "
        f"(twins {tolerance.twin_error:.1e}, floor {tolerance.floor:.1e})"
    )


def _unjudged(judgement: Judgement) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text.assemble(("? ", "bold yellow"), problem) for problem in judgement.problems[:_MOST_SHOWN]
    ]
    if len(judgement.problems) > _MOST_SHOWN:
        lines.append(Text(f"... and {len(judgement.problems) - _MOST_SHOWN} further problems", "dim"))
    # What a problem tells of many together is not told of each.
    told = {problem.rpartition(":")[0] for problem in judgement.problems if ":" in problem}
    spoilt = [comparison for comparison in judgement.comparisons if comparison.spoils and comparison.reason not in told]
    lines += [
        Text.assemble(("? ", "bold yellow"), f"{comparison.id} is {comparison.verdict}: {comparison.reason}")
        for comparison in spoilt[:_MOST_SHOWN]
    ]
    if len(spoilt) > _MOST_SHOWN:
        lines.append(Text(f"... and {len(spoilt) - _MOST_SHOWN} more that could not be judged", "dim"))
    return lines


def _counts(judgement: Judgement) -> Text:
    words = [f"{count} {verdict}" for verdict in Verdict if (count := judgement.count(verdict))]
    return Text(f"{len(judgement.comparisons)} tensors: {', '.join(words) or 'none'}")
