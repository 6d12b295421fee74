"""Results of a command: for people, for programs, for CI, and as its exit code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from ttrace.cli.screen import console
from ttrace.errors import TTraceError
from ttrace.files import replace_file, write_named
from ttrace.judge.baseline import NOTHING, Baseline
from ttrace.judge.engine import collect_rarely
from ttrace.judge.verdict import Exit, Judgement
from ttrace.report import sweep as sweep_report
from ttrace.report.machine import ci as github
from ttrace.report.machine import json_report, junit
from ttrace.report.page.contents import About, build_page
from ttrace.report.page.document import render_document
from ttrace.report.terminal import summary
from ttrace.workflow.run import EXIT_CODE, PAGE, REPORT, Run
from ttrace.workflow.sweeps.sweep import SweepResult


def read_baseline(path: Path | None, judgement: Judgement, *, update: bool) -> Baseline:
    """Read the file of known findings; with `update`, write this run's findings into it first."""
    if path is None:
        if update:
            raise TTraceError("--update-baseline needs --baseline FILE, the file to write.")
        return NOTHING
    if update:
        Baseline.of(judgement).save(path)
    return Baseline.load(path)


def finish(
    run: Run,
    judgement: Judgement,
    known: Baseline,
    *,
    json_output: bool,
    fail_on: str,
    junit_file: Path | None,
    is_stored: bool = False,
    leaves_code: bool = False,
) -> None:
    """Write and print what a check found, and exit; with `leaves_code`, write the exit code into a file too."""
    judgement, code = known.add_notes(judgement), known.exit(judgement)
    # Commands that show single tensors read them from a folder.
    next_command = "copy the traces to a folder, then: ttrace check RUN" if is_stored else run.next_command(judgement)
    report = write(run, judgement, next_command, is_stored=is_stored)
    if json_output:
        typer.echo(json.dumps(report))
    else:
        summary.show(console(), judgement, next_command, None if is_stored else run.folder / PAGE)
    if junit_file is not None:
        text = summary.render_text(judgement, next_command)
        junit.write(junit_file, "ttrace", [junit.Case(str(run.folder), code, text.splitlines()[0], text)])
    if github.is_on():
        for line in github.format_errors(known.find_new(judgement), Path.cwd()):
            typer.echo(line, err=True)
        github.add_summary(github.format_summary(judgement, str(run.folder)))
    status = _status(code, fail_on)
    if not leaves_code:
        (run.folder / EXIT_CODE).unlink(missing_ok=True)  # of an earlier check
    else:
        _leave_code(run, status)
    raise typer.Exit(status)


@contextmanager
def assume_unjudged(run: Run) -> Iterator[None]:
    """Wrap a check by torchrun: the file of its exit code says 2 until there is a result, and if it is refused."""
    _write(run.folder / EXIT_CODE, f"{int(Exit.UNJUDGED)}\n")
    try:
        yield
    except TTraceError:
        _leave_code(run, Exit.UNJUDGED)
        raise


def _leave_code(run: Run, status: int) -> None:
    """Write the exit code into a file, and say so: torchrun ends with 1 whatever the code of a rank was."""
    _write(run.folder / EXIT_CODE, f"{int(status)}\n")
    words = f"exit code {int(status)}: also in {run.folder / EXIT_CODE}, as torchrun ends with 0 or 1 only"
    typer.echo(words, err=True)


def _status(code: Exit, fail_on: str) -> int:
    return int(Exit.PASSED if code is Exit.UNJUDGED and fail_on == "findings" else code)


def finish_sweep(out: Path, result: SweepResult, *, json_output: bool, fail_on: str, junit_file: Path | None) -> None:
    """Write and print what a sweep found, and exit."""
    table = result.table
    failing = [row.values for row in table.failing]
    for cell in result.cells:
        if cell.judgement is not None and cell.cell.values in failing:
            write(cell.run, cell.judgement)  # the isolated run has added to it
    report = sweep_report.as_json(table, result.exit)
    _write(out / "sweep.json", json.dumps(report, indent=1))
    _write(out / "sweep.html", sweep_report.render_page(table))
    if junit_file is not None:
        junit.write(junit_file, "ttrace sweep", sweep_report.make_cases(table))
    worst = next(iter([*table.failing, *(row for row in table.rows if row.exit is not Exit.PASSED), *table.rows]))
    if json_output:
        typer.echo(json.dumps(report))
    else:
        next_command = f"ttrace check {shlex.quote(worst.folder)}"
        sweep_report.show(console(), table, next_command, str(out / "sweep.html"))
    if github.is_on():
        _write_for_github(result)
    raise typer.Exit(_status(result.exit, fail_on))


def _write_for_github(result: SweepResult) -> None:
    """Annotate the lines of the smallest cells that fail; the summary has the condition, and these cells."""
    table = result.table
    github.add_summary(github.format_sweep(table.condition, table.counts, result.exit))
    for cell in result.cells:
        if cell.judgement is not None and cell.cell.name in table.smallest:
            for line in github.format_errors(cell.judgement.findings, Path.cwd()):
                typer.echo(line, err=True)
            github.add_summary(github.format_summary(cell.judgement, cell.cell.name))


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
