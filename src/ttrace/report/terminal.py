"""This module tells a judgement in a terminal: the first divergence first, the next command last."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttrace.judge.verdict import Exit, Finding, Judgement, Verdict
from ttrace.report.facts import PASSED, alike, facts, headline

_MOST_SHOWN = 5
_INDENT = 12


def show(console: Console, judgement: Judgement, next_command: str, report: Path | None = None) -> None:
    """Print the whole judgement, and where the HTML report is."""
    parts: list[RenderableType] = []
    groups = alike(judgement.findings)
    for i, (finding, *others) in enumerate(groups[:_MOST_SHOWN]):
        parts += [_headline(finding, first=i == 0), *_details(finding, others, console.width)]
    if len(groups) > _MOST_SHOWN:
        parts.append(Text(f"... and {len(groups) - _MOST_SHOWN} further findings", "dim"))
    parts += _unjudged(judgement)
    if judgement.exit is Exit.PASSED:
        parts.append(Text(f"✓ {PASSED}", "bold green"))
    parts.append(_counts(judgement))
    parts += [Text(f"note: {note}", "dim") for note in judgement.notes]
    if report is not None:
        parts.append(Text.assemble(("report: ", "dim"), str(report)))
    parts.append(Text.assemble(("next: ", "dim"), (next_command, "bold")))
    console.print(Group(*parts), soft_wrap=True)


def _headline(finding: Finding, *, first: bool) -> Text:
    what, rest = headline(finding, first=first)
    return Text.assemble(("✗ ", "bold red"), (what, "bold red"), f" {rest}")


def _details(finding: Finding, others: list[Finding], width: int) -> list[RenderableType]:
    """What is known of a finding, in lines of this width: no table, which would fill them up with blanks."""
    lines: list[RenderableType] = []
    for label, text in facts(finding, others):
        wrapped = textwrap.wrap(text, max(width - _INDENT, 40), break_long_words=False, break_on_hyphens=False)
        for i, part in enumerate(wrapped):
            head = f"  {label if i == 0 else '':<{_INDENT - 4}}  "
            lines.append(Text.assemble((head, "dim"), (part, "bold" if label == "cause" else "")))
    return [*lines, Text()]


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
