"""Lines on standard error that show the stages of a run, each with the time that it took."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ttrace.report.terminal.console import CleanConsole


class StageLines:
    """One line per stage. On a terminal the current stage has a live line; in a pipe its line appears when it ends."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or CleanConsole(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # In a pipe even a live line that is removed leaves an empty one.
        is_hidden = not self._console.is_terminal
        self._live = Progress(*columns, console=self._console, transient=True, disable=is_hidden)
        self._task = self._live.add_task("starting")
        self._stage, self._start = "", 0.0

    def __enter__(self) -> StageLines:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end("" if kind is None else ", not finished")
        self._live.stop()
        if kind is KeyboardInterrupt:
            self.on_note("interrupted: nothing is left running, and the same command continues from here")

    def on_stage(self, name: str) -> None:
        """Begin a stage, which ends the one before; with an empty name, only end it."""
        self._end()
        self._stage, self._start = name, time.monotonic()
        self._live.reset(self._task, description=name)

    def on_note(self, line: str) -> None:
        """Show a line about the stage that runs."""
        self._console.print(Text(line, style="dim"), soft_wrap=True)  # a style for all would include the live line

    def _end(self, how: str = "") -> None:
        if self._stage:
            self.on_note(f"{self._stage}: {time.monotonic() - self._start:.1f} s{how}")
        self._stage = ""
