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
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", help="Write the candidate's step over time, for ui.perfetto.dev: trace.json.gz."),
    ] = None,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
) -> None:
    """Write the HTML report of a run again, or its step over time."""
    from rich.console import Console
    from rich.text import Text

    from ttrace.cli import outcome, screen
    from ttrace.report.machine.perfetto import write_perfetto
    from ttrace.workflow.lock import hold
    from ttrace.workflow.run import Run, Strictness, open_trace

    run = Run(folder)
    run.check_complete()
    with hold(folder):
        with screen.show_progress("check", Console(stderr=True)) as progress:
            judgement = run.judge(Strictness.load(margin, allow), progress=progress)
        if perfetto is not None:
            write_perfetto(perfetto, judgement, open_trace(run.most_detailed.candidate))
            screen.console().print(Text(f"perfetto: {perfetto} (open it in https://ui.perfetto.dev)"), soft_wrap=True)
        if perfetto is None or out is not None:
            screen.console().print(Text(f"report: {outcome.write_page(run, judgement, out)}"), soft_wrap=True)
