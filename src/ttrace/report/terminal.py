"""This module tells a judgement in a terminal: the first divergence first, the next command last."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ttrace.judge.verdict import Comparison, Exit, Finding, Judgement, Verdict

_MOST_SHOWN = 5


def show(console: Console, judgement: Judgement, next_command: str) -> None:
    """Print the whole judgement."""
    parts: list[RenderableType] = []
    for i, finding in enumerate(judgement.findings[:_MOST_SHOWN]):
        parts += [_headline(finding, first=i == 0), Padding(_details(finding), (0, 0, 1, 2))]
    if len(judgement.findings) > _MOST_SHOWN:
        parts.append(Text(f"... and {len(judgement.findings) - _MOST_SHOWN} further findings", "dim"))
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


def _details(finding: Finding) -> RenderableType:
    comparison = finding.comparison
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("cause", Text(finding.cause.sentence, "bold"))
    table.add_row("error", _error(comparison))
    for i, line in enumerate(finding.cause.evidence):
        table.add_row("evidence" if i == 0 else "", Text(line))
    if comparison.by:
        table.add_row("layout", Text(f'"{comparison.layout}", {comparison.by}'))
    if finding.source:
        table.add_row("module", Text(f"{finding.module}, {finding.source}"))
    if finding.num_after:
        after = "1 tensor after it is" if finding.num_after == 1 else f"{finding.num_after} tensors after it are"
        table.add_row("then", f"{after} wrong")
    return table


def _error(comparison: Comparison) -> str:
    tolerance = comparison.tolerance
    assert tolerance is not None
    worst = max(comparison.error, comparison.replica_error)
    between = " between replicas" if comparison.replica_error > comparison.error else ""
    return (
        f"{worst:.1e}{between}, {comparison.excess:.1e} x the tolerance {tolerance.value:.1e} "
        f"(twins {tolerance.twin_error:.1e}, floor {tolerance.floor:.1e})"
    )


def _unjudged(judgement: Judgement) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text.assemble(("? ", "bold yellow"), problem) for problem in judgement.problems[:_MOST_SHOWN]
    ]
    if len(judgement.problems) > _MOST_SHOWN:
        lines.append(Text(f"... and {len(judgement.problems) - _MOST_SHOWN} further problems", "dim"))
    spoilt = [comparison for comparison in judgement.comparisons if comparison.spoils]
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
