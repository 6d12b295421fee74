"""Results of a command: for people, for programs and for CI, and as its exit code."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ttrace.cli.options import KnownFindings, Output
from ttrace.errors import TTraceError
from ttrace.judge.engine import collect_rarely
from ttrace.judge.policy import NOTHING, Baseline
from ttrace.judge.verdict import Exit, Judgement
from ttrace.report import sweep as sweep_report
from ttrace.report.machine import ci, json_report
from ttrace.report.page.contents import About, build_page
from ttrace.report.page.document import render_document
from ttrace.report.refusal import CleanConsole
from ttrace.report.terminal import summary
from ttrace.trace.store import Remote
from ttrace.untrusted import replace_file, write_named
from ttrace.workflow.run import EXIT_CODE, PAGE, REPORT, Run, RunTraces
from ttrace.workflow.sweeps.sweep import SweepResult


def finish(
    traces: Run | RunTraces[Remote],
    judgement: Judgement,
    known: KnownFindings,
    output: Output,
    *,
    leaves_code: bool = False,
) -> int:
    """Write and print the result of a check, and return the exit code; with `leaves_code`, also write it to a file.

    The report on traces in a store is written to the current folder.
    """
    run = traces if isinstance(traces, Run) else Run(Path())
    is_stored = run is not traces
    baseline = _read_baseline(known, judgement)
    judgement, code = baseline.add_notes(judgement), baseline.exit(judgement)
    # Commands that show single tensors read them from a folder.
    next_command = "copy the traces to a folder, then: ttrace check RUN" if is_stored else run.next_command(judgement)
    report = write(run, judgement, next_command, is_stored=is_stored)
    if output.json:
        typer.echo(json.dumps(report))
    else:
        summary.show(console(), judgement, next_command, None if is_stored else run.folder / PAGE)
    if output.junit is not None:
        text = summary.render_text(judgement, next_command)
        ci.write(output.junit, "ttrace", [ci.Case(str(run.folder), code, text.splitlines()[0], text)])
    if ci.is_on():
        for line in ci.format_errors(baseline.find_new(judgement), Path.cwd()):
            typer.echo(line, err=True)
        ci.add_summary(ci.format_summary(judgement, str(run.folder)))
    status = _status(code, output)
    if not leaves_code:
        (run.folder / EXIT_CODE).unlink(missing_ok=True)  # of an earlier check
    else:
        _leave_code(run, status)
    return status


def _read_baseline(known: KnownFindings, judgement: Judgement) -> Baseline:
    """Read the file of known findings; with --update-baseline, write this run's findings to it first."""
    if known.baseline is None:
        if known.update_baseline:
            raise TTraceError("--update-baseline needs --baseline FILE, the file to write.")
        return NOTHING
    if known.update_baseline:
        Baseline.of(judgement).save(known.baseline)
    return Baseline.load(known.baseline)


@contextmanager
def assume_unjudged(run: Run) -> Iterator[None]:
    """Wrap a check by torchrun: the file with its exit code holds 2 until there is a result, and after an error."""
    _write(run.folder / EXIT_CODE, f"{int(Exit.UNJUDGED)}\n")
    try:
        yield
    except TTraceError:
        _leave_code(run, Exit.UNJUDGED)
        raise


def _leave_code(run: Run, status: int) -> None:
    """Write the exit code to a file, and print where: torchrun ends with 1 whatever the exit code of a rank is."""
    _write(run.folder / EXIT_CODE, f"{int(status)}\n")
    words = f"exit code {int(status)}: also in {run.folder / EXIT_CODE}, as torchrun ends with 0 or 1 only"
    typer.echo(words, err=True)


def _status(code: Exit, output: Output) -> int:
    return int(Exit.PASSED if code is Exit.UNJUDGED and output.fail_on == "findings" else code)


def finish_sweep(out: Path, result: SweepResult, output: Output) -> int:
    """Write and print the result of a sweep, and return the exit code."""
    table = result.table
    failing = [row.values for row in table.failing]
    for cell in result.cells:
        if cell.judgement is not None and cell.cell.values in failing:
            write(cell.run, cell.judgement)  # again, as the isolated run has added to it
    report = sweep_report.as_json(table, result.exit)
    _write(out / "sweep.json", json.dumps(report, indent=1))
    _write(out / "sweep.html", sweep_report.render_page(table))
    if output.junit is not None:
        ci.write(output.junit, "ttrace sweep", sweep_report.make_cases(table))
    worst = next(iter([*table.failing, *(row for row in table.rows if row.exit is not Exit.PASSED), *table.rows]))
    if output.json:
        typer.echo(json.dumps(report))
    else:
        next_command = f"ttrace check {shlex.quote(worst.folder)}"
        sweep_report.show(console(), table, next_command, str(out / "sweep.html"))
    if ci.is_on():
        _write_for_github(result)
    return _status(result.exit, output)


def _write_for_github(result: SweepResult) -> None:
    """Annotate source lines for the smallest failing cells; summarize the condition and these cells."""
    table = result.table
    ci.add_summary(ci.format_sweep(table.condition, table.counts, result.exit))
    for cell in result.cells:
        if cell.judgement is not None and cell.cell.name in table.smallest:
            for line in ci.format_errors(cell.judgement.findings, Path.cwd()):
                typer.echo(line, err=True)
            ci.add_summary(ci.format_summary(cell.judgement, cell.cell.name))


@collect_rarely()
def write(run: Run, judgement: Judgement, next_command: str = "", *, is_stored: bool = False) -> json_report.Report:
    """Write the report as a page and for programs, beside the traces; traces in a store get no page."""
    report = json_report.as_json(judgement, next_command or run.next_command(judgement))
    _write(run.folder / REPORT, json_report.format_text(report))
    if not is_stored:
        write_page(run, judgement)
    return report


def write_page(run: Run, judgement: Judgement, out: Path | None = None) -> Path:
    """Write the report as a page, and return where it is."""
    is_named, out = out is not None, run.folder / PAGE if out is None else out
    about = About.of(run.folder, run.next_command(judgement), run.most_detailed.folder)
    advice = "Choose another place with `ttrace report -o`."
    _write(out, render_document(build_page(judgement, about)), advice, is_named=is_named)
    return out


def _write(
    path: Path,
    text: str,
    advice: str = "Free the disk, or copy the folder to where it can be written.",
    *,
    is_named: bool = False,
) -> None:
    try:
        (write_named if is_named else replace_file)(path, text)
    except OSError as error:
        raise TTraceError(f"{path} cannot be written: {error}. {advice}") from None


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


class StageLines:
    """One line per stage on standard error, with the time that it took.

    On a terminal the current stage has a live line; in a pipe its line appears when it ends.
    """

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
