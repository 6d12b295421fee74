"""Consoles and progress bars of the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from ttrace.report.terminal.console import CleanConsole


def console() -> Console:
    """Make a console for standard output; wide in a pipe, so that ids stay in one piece for grep and copy."""
    is_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return CleanConsole(width=None if is_terminal else 160)


def make_bar(console: Console, *more: ProgressColumn) -> Progress:
    """Make a progress bar that is removed when it has ended."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *more)
    # In a pipe even a bar that is removed leaves an empty line.
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def show_progress(name: str, console: Console, *more: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of one task; call the result with how much of how much is done."""
    with make_bar(console, *more) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
