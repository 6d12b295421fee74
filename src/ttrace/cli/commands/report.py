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
    from rich.text import Text

    from ttrace.cli import outcome
    from ttrace.report.machine.perfetto import write_perfetto
    from ttrace.report.refusal import CleanConsole
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run, Strictness, open_trace

    run = Run(folder)
    run.check_complete()
    done: list[str] = []
    with hold(folder):
        with outcome.show_progress("check", CleanConsole(stderr=True)) as progress:
            judgement = run.judge(Strictness.load(margin, allow), progress=progress)
        if perfetto is None or out is not None:
            done.append(f"report: {outcome.write_page(run, judgement, out)}")
        if perfetto is not None:
            write_perfetto(perfetto, judgement, open_trace(run.most_detailed.candidate))
            done.append(f"perfetto: {perfetto} (open it in https://ui.perfetto.dev)")
    for line in done:
        outcome.console().print(Text(line), soft_wrap=True)
