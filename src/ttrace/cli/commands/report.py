"""The command `ttrace report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.judge.margin import MARGIN


def report(
    folder: options.RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; RUN/report.html if not given.")
    ] = None,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
) -> None:
    """Write the HTML report of a run again."""
    from rich.text import Text

    from ttrace.cli import outcome
    from ttrace.report.refusal import CleanConsole
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run, Strictness

    run = Run(folder)
    run.check_complete()
    with hold(folder):
        with outcome.show_progress("check", CleanConsole(stderr=True)) as progress:
            judgement = run.judge(Strictness.load(margin, allow), progress=progress)
        page = outcome.write_page(run, judgement, out)
    outcome.console().print(Text(f"report: {page}"), soft_wrap=True)
