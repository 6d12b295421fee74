"""The score by line: of which bugs the wrong line of code is named, and the operation that goes wrong there."""

from __future__ import annotations

import json
import linecache
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrace.judge.verdict import CauseName
from ttrace.layouts.ids import Kind
from zoo.bug import Expected, Run, bugs
from zoo.launch import by_line, seen
from zoo.seen import Seen

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured" / "lines.json"
LINE, OPERATION, ENTRIES = 0.9, 0.8, 50
"""The bars: fractions of the entries that state their wrong line, and how many do."""
HEADING = "## The wrong line"

_BEFORE = "the values are wrong before the step: none of its operations made them"
_UPDATE = "it is in the optimizer or in clipping, where operations are not recorded"
_LIBRARY = "a library reduces gradients, or fails to: no line of the script does"
_ASSIGNED = "the gradient is assigned, or set to None, and no function of torch is called"
_ABSENT = "what is missing has no line"
_SILENT = "all operations of the module are right in isolation"
_OTHER = "another line of the module is the first with a wrong result"
_AFTER = (Kind.UPDATE, Kind.GRAD_NORM, Kind.CLIP, Kind.OPTIM, Kind.PARAM_AFTER)


def score_lines(tell: Callable[[str], None]) -> int:
    """Run all entries that state their wrong line, write the results and their table, and return the exit code."""
    runs = [Run(name, False) for name, bug in bugs().items() if bug.expected.line]
    with tempfile.TemporaryDirectory() as folder:
        found = seen(runs, Path(folder), tell, judge=by_line)
    rows = {
        run.name: measure(run.bug.expected, one) for run, one in sorted(found.items(), key=lambda item: str(item[0]))
    }
    MEASURED.write_text(json.dumps(rows, indent=1) + "\n")
    page = ROOT / "docs" / "evaluation.md"
    page.write_text(replace_section(page.read_text(), rows))
    for name, row in rows.items():
        marks = "".join("✓" if row[key] else "✗" for key in ("line", "operation"))
        print(f"{marks} {name:34} {row['named'] or row['reason']}")
    print(describe(rows))
    shares = [share(rows, key) for key in ("line", "operation")]
    return 0 if len(rows) >= ENTRIES and shares[0] >= LINE and shares[1] >= OPERATION else 1


def measure(expected: Expected, found: Seen) -> dict[str, Any]:
    """Hold what was named against what the entry states."""
    texts = [_read_line(place) for place in (found.line, found.called_at)]
    is_line = any(expected.line in text for text in texts)
    is_operation = found.operation == expected.operation
    named = f"{found.operation} at {_shorten(found.line)}" if found.operation else ""
    reason = "" if is_line else _explain(found)
    return {"line": is_line, "operation": is_operation, "named": named, "stated": expected.line, "reason": reason}


def share(rows: Mapping[str, Mapping[str, Any]], key: str) -> float:
    return sum(bool(row[key]) for row in rows.values()) / max(len(rows), 1)


def describe(rows: Mapping[str, Mapping[str, Any]]) -> str:
    wrong = sum(bool(row["named"]) and not row["line"] for row in rows.values())
    return (
        f"{len(rows)} entries state their wrong line: {share(rows, 'line'):.0%} name it or its call (bar {LINE:.0%}), "
        f"{share(rows, 'operation'):.0%} the operation (bar {OPERATION:.0%}), {wrong} name another line"
    )


def format_section(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the section of docs/evaluation.md."""
    lines = [
        f"| `{name}` | {_mark(row['line'])} | {_mark(row['operation'])} | {_said(row)} |" for name, row in rows.items()
    ]
    table = "\n".join(["| entry | line | operation | named, or why not |", "|---|---|---|---|", *lines])
    return (
        f"{HEADING}\n\n`python -m zoo score --by-line` runs what it accuses once more, isolated, and compares the line "
        f"that is named\nwith the one that the entry states. {describe(rows)}.\n\n{table}\n\n"
    )


def replace_section(page: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Put the section into a page, before that of false alarms or in place of the one that is there."""
    without = re.sub(rf"{HEADING}\n.*?(?=\n## |\Z)\n", "", page, flags=re.DOTALL)
    return without.replace("## False alarms", f"{format_section(rows)}## False alarms", 1)


def read_rows() -> dict[str, dict[str, Any]]:
    """Read what was measured last."""
    found: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text())
    return found


def _explain(found: Seen) -> str:
    """Say why the line is not named."""
    if found.kind in (Kind.PARAM, Kind.BUFFER):
        return _BEFORE
    if found.kind in _AFTER:
        return _UPDATE
    if found.operation:
        return _OTHER
    if found.cause == CauseName.MISSING_MODULES.value:
        return _ABSENT
    if found.kind != Kind.PARAM_GRAD:
        return _SILENT
    return _ASSIGNED if found.cause == CauseName.OTHERS_VALUES.value else _LIBRARY


def _read_line(place: str) -> str:
    file, _, number = place.rpartition(":")
    return linecache.getline(file, int(number)) if number.isdigit() else ""


def _shorten(place: str) -> str:
    return place.removeprefix(f"{ROOT}/")


def _said(row: Mapping[str, Any]) -> str:
    words: Sequence[str] = [f"`{row['named']}`" if row["named"] else "", row["reason"]]
    return ": ".join(word for word in words if word)


def _mark(is_so: bool) -> str:
    return "yes" if is_so else "**no**"
