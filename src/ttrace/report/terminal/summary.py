"""Summary of a judgement for a terminal: the first wrong tensor first, the next command last."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttrace.judge.reason import Reason, describe
from ttrace.judge.verdict import Exit, Finding, Judgement, Verdict
from ttrace.report.facts import (
    BUT_PROBLEMS,
    PASSED,
    group_alike,
    has_only_problems,
    list_facts,
    list_reach,
    make_headline,
)
from ttrace.report.refusal import CleanConsole
from ttrace.report.terminal.depth import WRONG, draw_branches, draw_strip

_MOST_SHOWN = 5
_INDENT = 12
_STRIP_INDENT = 14
"""The labels of the strip are longer than those of facts."""
_LEGENDS = {Verdict.CONFLICT: " (replicas differ)", Verdict.GAP: " (no rank holds some part)"}
"""The meaning of verdicts whose names do not explain it."""


@dataclass(frozen=True)
class _Block:
    """Lines that belong together."""

    parts: Sequence[RenderableType]
    urgency: int = 0
    """Blocks with 0 are always shown. Others are shown in ascending order while there is room."""


def show(console: Console, judgement: Judgement, next_command: str, report: Path | None = None) -> None:
    """Print the judgement and the path of the HTML report. Less urgent blocks are shown only if the screen has room."""
    last = [Text.assemble(("report: ", "dim"), str(report))] if report is not None else []
    notes = [_Block([Text(f"note: {note}", "dim")], urgency=2) for note in judgement.notes]
    blocks = [
        *_describe_findings(judgement, console.width),
        _Block(_list_unjudged(judgement)),
        _Block([Text(f"✓ {PASSED}", "bold green")] if judgement.exit is Exit.PASSED else []),
        _Block([line for fact in list_reach(judgement) for line in _wrap_fact(*fact, console.width)]),
        _Block(_draw_strip_lines(judgement, console.width), urgency=1),
        _Block(_draw_tree(console, judgement), urgency=3),
        _Block([_format_counts(judgement)]),
        *notes,
        _Block([*last, Text.assemble(("next: ", "dim"), (next_command, "bold"))]),
    ]
    if console.is_terminal:
        blocks = _choose_fitting(console, blocks)
        num_left_out = len(notes) - sum(block in notes for block in blocks)
        if num_left_out:
            blocks.insert(-1, _Block([Text(f"... and {num_left_out} more notes in the report", "dim")]))
    console.print(Group(*(part for block in blocks for part in block.parts)), soft_wrap=True)


def render_text(judgement: Judgement, next_command: str, *, width: int = 100, height: int = 40) -> str:
    """Render the same as plain text that fits a screen, for other programs to print."""
    output = StringIO()
    console = CleanConsole(file=output, width=width, height=height, force_terminal=True, color_system=None)
    show(console, judgement, next_command)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _choose_fitting(console: Console, blocks: list[_Block]) -> list[_Block]:
    """Choose the blocks that fit on the screen, with a line for the prompt and one for what was left out."""
    heights = [sum(len(console.render_lines(part)) for part in block.parts) for block in blocks]
    room = console.height - 2
    chosen = set()
    for at in sorted(range(len(blocks)), key=lambda at: blocks[at].urgency):
        if blocks[at].urgency == 0 or heights[at] <= room:
            chosen.add(at)
            room -= heights[at]
    return [block for at, block in enumerate(blocks) if at in chosen]


def _describe_findings(judgement: Judgement, width: int) -> list[_Block]:
    groups = group_alike(judgement.findings)
    blocks = []
    for i, (finding, *others) in enumerate(groups[:_MOST_SHOWN]):
        blocks.append(_Block([_format_headline(finding, first=i == 0)]))
        blocks.append(_Block(_format_details(finding, others, width), urgency=0 if i == 0 else 4))
    if len(groups) > _MOST_SHOWN:
        blocks.append(_Block([Text(f"... and {len(groups) - _MOST_SHOWN} further findings", "dim")]))
    return blocks


def _draw_strip_lines(judgement: Judgement, width: int) -> list[Text]:
    return [
        Text.assemble((f"  {label:<{_STRIP_INDENT - 4}}  ", "dim"), _colour_marks(marks))
        for label, marks in draw_strip(judgement.comparisons, max(width - _STRIP_INDENT, 20))
    ]


def _colour_marks(marks: str) -> Text:
    text = Text(marks)
    text.highlight_regex(f"{WRONG}+", "bold red")
    return text


def _draw_tree(console: Console, judgement: Judgement) -> list[Text]:
    """Render the tree line by line: rich pads the lines of a whole tree with blanks."""
    findings = judgement.findings
    tree = draw_branches(judgement.comparisons, findings[0].comparison) if findings else None
    lines = console.render_lines(tree, pad=False) if tree is not None else []
    return [Text.assemble("  ", *((part.text, part.style or "") for part in line)) for line in lines]


def _format_headline(finding: Finding, *, first: bool) -> Text:
    what, rest = make_headline(finding, first=first)
    return Text.assemble(("✗ ", "bold red"), (what, "bold red"), f" {rest}")


def _format_details(finding: Finding, others: list[Finding], width: int) -> list[RenderableType]:
    """Wrap the facts of a finding to this width; not in a table, whose lines rich pads with blanks."""
    return [*(line for fact in list_facts(finding, others) for line in _wrap_fact(*fact, width)), Text()]


def _wrap_fact(label: str, text: str, width: int) -> Iterator[Text]:
    wrapped = textwrap.wrap(text, max(width - _INDENT, 40), break_long_words=False, break_on_hyphens=False)
    for i, part in enumerate(wrapped):
        head = f"  {label if i == 0 else '':<{_INDENT - 2}}"
        yield Text.assemble((head, "dim"), (part, "bold" if label == "cause" else ""))


def _list_unjudged(judgement: Judgement) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if has_only_problems(judgement):
        lines.append(Text.assemble(("? ", "bold yellow"), (f"{BUT_PROBLEMS}:", "bold")))
    lines += [Text.assemble(("? ", "bold yellow"), problem) for problem in judgement.problems[:_MOST_SHOWN]]
    if len(judgement.problems) > _MOST_SHOWN:
        lines.append(Text(f"... and {len(judgement.problems) - _MOST_SHOWN} further problems", "dim"))
    # One problem covers all tensors of a missing module.
    spoilt = [c for c in judgement.comparisons if c.spoils and c.reason is not Reason.NO_MODULE]
    lines += [
        Text.assemble(("? ", "bold yellow"), f"{comparison.id} is {comparison.verdict}: {describe(comparison.why)}")
        for comparison in spoilt[:_MOST_SHOWN]
    ]
    if len(spoilt) > _MOST_SHOWN:
        lines.append(Text(f"... and {len(spoilt) - _MOST_SHOWN} more tensors could not be judged", "dim"))
    return lines


def _format_counts(judgement: Judgement) -> Text:
    counts = {verdict: count for verdict in Verdict if (count := judgement.count(verdict))}
    words = [f"{count} {verdict}{_LEGENDS.get(verdict, '')}" for verdict, count in counts.items()]
    return Text(f"{len(judgement.comparisons)} tensors: {', '.join(words) or 'none'}")
