"""Report of a sweep: the condition for failure, the smallest cells that fail, and a table of all cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ttrace.judge.reason import describe
from ttrace.judge.verdict import Exit, Judgement
from ttrace.report.facts import SYMBOLS
from ttrace.report.machine import ci

SCHEMA = 1
_STYLES = {Exit.PASSED: "green", Exit.FOUND: "bold red", Exit.UNJUDGED: "bold yellow"}


@dataclass(frozen=True)
class SweepRow:
    """One cell, in one line."""

    name: str
    values: dict[str, int | float | str | bool]
    exit: Exit
    seconds: float
    folder: str
    first: str = ""
    """The first wrong tensor; empty if there is none."""
    why: str = ""
    """Its cause, or why nothing could be judged."""

    @classmethod
    def of(cls, judgement: Judgement | None, problem: str = "", **known: Any) -> SweepRow:
        if judgement is None:
            return cls(**known, why=problem)
        if judgement.findings:
            finding = judgement.findings[0]
            return cls(**known, first=str(finding.comparison.id.site), why=finding.cause.sentence)
        spoilt = next((f"{c.id}: {describe(c.why)}" for c in judgement.comparisons if c.spoils), "")
        return cls(**known, why=next(iter(judgement.problems), spoilt) if judgement.exit is Exit.UNJUDGED else "")


@dataclass(frozen=True)
class SweepTable:
    """The whole result of a sweep."""

    rows: tuple[SweepRow, ...]
    num_references: int
    condition: str = ""
    """When cells fail; empty if none does."""
    smallest: tuple[str, ...] = ()
    """The names of the smallest cells that fail, one for each part of the condition."""

    @property
    def failing(self) -> list[SweepRow]:
        """The smallest cells that fail."""
        return [row for row in self.rows if row.name in self.smallest]

    @property
    def counts(self) -> str:
        words = {Exit.PASSED: "passed", Exit.FOUND: "failed", Exit.UNJUDGED: "could not be judged"}
        numbers = {word: sum(row.exit is code for row in self.rows) for code, word in words.items()}
        cells = ", ".join(f"{count} {word}" for word, count in numbers.items() if count)
        return f"{len(self.rows)} cells: {cells}; {self.num_references} reference{'s'[: self.num_references != 1]}"


def as_json(table: SweepTable, code: Exit) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "exit": int(code),
        "condition": table.condition,
        "smallest": [row.values for row in table.failing],
        "references": table.num_references,
        "cells": [
            {
                "values": row.values,
                "exit": int(row.exit),
                "seconds": round(row.seconds, 3),
                "first": row.first,
                "why": row.why,
                "folder": row.folder,
            }
            for row in table.rows
        ],
    }


def make_cases(table: SweepTable) -> list[ci.Case]:
    """Make a JUnit case of each cell."""
    return [
        ci.Case(row.name, row.exit, _describe_row(row), f"{_describe_row(row)}\n{table.condition}", row.seconds)
        for row in table.rows
    ]


def show(console: Console, table: SweepTable, next_command: str, report: str) -> None:
    """Print the condition first, the next command last."""
    if table.condition:
        console.print(Text.assemble(("✗ ", "bold red"), (table.condition, "bold red")), soft_wrap=True)
    for row in table.failing:
        console.print(Text.assemble(("  smallest  ", "dim"), (row.name, "bold")), soft_wrap=True)
        console.print(Text.assemble(("  first     ", "dim"), row.first), soft_wrap=True)
        console.print(Text.assemble(("  cause     ", "dim"), row.why), soft_wrap=True)
    console.print(_make_cells(table.rows))
    console.print(Text(table.counts))
    console.print(Text.assemble(("report: ", "dim"), report), soft_wrap=True)
    console.print(Text.assemble(("next: ", "dim"), (next_command, "bold")), soft_wrap=True)


def render_page(table: SweepTable) -> str:
    """Render the same as one small HTML file that loads nothing."""
    axes = list(table.rows[0].values)
    head = "".join(f"<th>{escape(word)}</th>" for word in ("", *axes, "seconds", "first wrong tensor", "why"))
    body = "\n".join(_render_row(row) for row in table.rows)
    smallest = "".join(
        f"<p>Smallest: <b>{escape(row.name)}</b>. {escape(_describe_row(row))}</p>\n" for row in table.failing
    )
    title = table.condition or "every cell that was judged agrees with its reference"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>TTrace sweep</title>
<style>{_STYLE}</style>
<h1>{escape(title)}</h1>
{smallest}<p>{escape(table.counts)}</p>
<div><table>
<tr>{head}</tr>
{body}
</table></div>
"""


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem }
h1 { font-size: 1.4rem }
div { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #8884; vertical-align: top }
.FOUND td:first-child { color: #d22; font-weight: bold }
.UNJUDGED td:first-child { color: #b80; font-weight: bold }
.PASSED td:first-child { color: #292 }
"""


def _render_row(row: SweepRow) -> str:
    name = PurePath(row.folder).name
    link = f'<a href="cells/{escape(name)}/report.html">{SYMBOLS[row.exit]}</a>'
    words = [*map(_format_value, row.values.values()), f"{row.seconds:.1f}", row.first, row.why]
    return f'<tr class="{row.exit.name}"><td>{link}</td>{"".join(f"<td>{escape(w)}</td>" for w in words)}</tr>'


def _make_cells(rows: Sequence[SweepRow]) -> RichTable:
    table = RichTable(box=None, pad_edge=False, header_style="dim")
    for word in ("", *rows[0].values, "seconds"):
        table.add_column(word, justify="right" if word == "seconds" else "left")
    table.add_column("first wrong tensor", overflow="fold")
    for row in rows:
        first = row.first or (row.why.splitlines() or [""])[0]
        cells = [
            Text(SYMBOLS[row.exit], _STYLES[row.exit]),
            *(Text(_format_value(value)) for value in row.values.values()),
        ]
        table.add_row(*cells, Text(f"{row.seconds:.1f}"), Text(first))
    return table


def _format_value(value: float | str | bool) -> str:
    return ("yes" if value else "-") if isinstance(value, bool) else str(value)


def _describe_row(row: SweepRow) -> str:
    return f"{row.first}: {row.why}" if row.first else row.why
