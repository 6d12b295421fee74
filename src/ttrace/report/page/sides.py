"""Where a run's two traces come from: the commands, when they were traced, and the git commits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttrace.errors import TraceError
from ttrace.text import clean_text
from ttrace.trace.seal import read_document

ROLES = ("reference", "candidate")
_COMMIT_LETTERS = 12


@dataclass(frozen=True)
class Side:
    """How one trace was made; a field that is not known is empty."""

    command: str = ""
    date: str = ""
    """In UTC, to the minute."""
    commit: str = ""
    """Shortened, and whether files differed from it."""


def read_sides(folder: Path) -> dict[str, Side]:
    """Read how the reference and the candidate of a run were made.

    Each trace has a mark of its own beside it, since a reference may be older than the candidate. Only marks of older
    versions lack the date and the commit; then the commit of the whole run is the next best.
    """
    run = read_document(folder / "run.json")
    return {role: _read(folder / role, run, role) for role in ROLES}


def _read(trace: Path, run: dict[str, Any], role: str) -> Side:
    place = trace.resolve()  # cells of a sweep link to references that they share
    try:
        mark = read_document(place.parent / f"{place.name}.done.json")
    except TraceError:
        mark = {}  # a damaged mark says nothing
    command = mark.get("command")
    return Side(
        clean_text(shlex.join(map(str, command))) if isinstance(command, list) else _text(run, role),
        _format_date(_text(mark, "time")),
        _format_commit(_text(mark, "git") or _text(run, "git")),
    )


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    return clean_text(value) if isinstance(value, str) else ""


def _format_date(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return ""


def _format_commit(state: str) -> str:
    changed = ", with uncommitted changes" if state.endswith("+") else ""
    return f"{state.removesuffix('+')[:_COMMIT_LETTERS]}{changed}"
