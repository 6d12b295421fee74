"""Where the ranks of a launch are that does not end: the line of the script, and the last collective of each."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Set
from pathlib import Path

from ttrace.capture.plan import Plan
from ttrace.capture.script_files import is_of_script
from ttrace.capture.stacks import SIGNAL, STACK
from ttrace.errors import TraceError
from ttrace.files import read_file
from ttrace.report.facts import quote_collective, shorten_place
from ttrace.trace.collectives import COLLECTIVES, decode_collectives
from ttrace.untrusted import Limits

_PATIENCE = 2.0
"""Seconds in which a process writes its stack."""
_PAUSE = 0.02
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


def describe_hang(plan: Plan, processes: Set[int]) -> list[str]:
    """Ask the ranks for their stacks, and say of each where it is; `processes` are those of the launch."""
    folders = [folder for each in (plan, *plan.then) for folder in sorted(each.out.glob("rank-*"))]
    asked = [folder for folder in folders if _ask(folder / STACK, processes)]
    deadline = time.monotonic() + _PATIENCE
    while any(not _list_frames(folder / STACK) for folder in asked) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return [_describe(folder) for folder in asked]


def _ask(path: Path, processes: Set[int]) -> bool:
    """Ask the process that offers its stack in this file, if it still runs and is one of this launch."""
    try:
        process = int(path.read_text(encoding="utf-8").partition("\n")[0])
    except (OSError, ValueError):
        return False
    if SIGNAL is None or process not in processes:
        return False
    with contextlib.suppress(OSError):
        os.kill(process, SIGNAL)
    return True


def _describe(folder: Path) -> str:
    rank = int(folder.name.removeprefix("rank-"))
    frames = _list_frames(folder / STACK)
    file, line, function = next((frame for frame in frames if is_of_script(frame[0])), ("", "", ""))
    where = f"at {shorten_place(f'{file}:{line}')} in {function}" if file else "in code that is not the script's"
    return f"Rank {rank} is {where}; {_describe_last(folder / COLLECTIVES)}"


def _list_frames(path: Path) -> list[tuple[str, str, str]]:
    """List the frames of a stack, the innermost first: file, line and function."""
    try:
        return [match.groups() for match in _FRAME.finditer(path.read_text(errors="replace"))]  # type: ignore[misc]  # three
    except OSError:
        return []


def _describe_last(path: Path) -> str:
    try:
        found = decode_collectives(read_file(path, Limits.get().lines_bytes), str(path), None)
    except (OSError, TraceError):
        found = ()
    if not found:
        return "it has issued no collective in this step"
    last = found[-1]
    where = f", in the {last.phase.value} of {last.module}" if last.module else ""
    return f"its last collective, number {last.order + 1}, is {quote_collective(last)}{where}"
