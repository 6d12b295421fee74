"""This module is how the commands write to the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn


def console() -> Console:
    """Standard output; wide where nobody watches, so that ids stay in one piece for grep and copy."""
    is_watched = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_watched else 160)


def bar(console: Console, *more: ProgressColumn) -> Progress:
    """A progress bar that vanishes when it has ended."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *more)
    # In a pipe even a vanishing bar leaves an empty line.
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counted(name: str, console: Console, *more: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """A bar of one task; what it gives is told how much of how much is done."""
    with bar(console, *more) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
