"""The command `ttrace check`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli.completion import complete_run
from ttrace.cli.options import Allow, KnownFindings, Margin, Output, common, parallelism
from ttrace.errors import TTraceError
from ttrace.judge.margin import MARGIN
from ttrace.workflow.engines.engine_name import EngineName, is_reporter


def check(
    where: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's folder, or the URL of its traces in a store.", autocompletion=complete_run
        ),
    ],
    known: KnownFindings,
    output: Output,
    margin: Margin = MARGIN,
    allow: Allow = None,
    engine: Annotated[
        EngineName, common(help="Where to compare: in threads or processes here, in this torchrun job, or on Ray.")
    ] = "threads",
    workers: Annotated[
        int, common(min=0, help="The number of threads or processes; 0 means one per core, up to eight.")
    ] = 0,
    rules: Annotated[
        Path | None, parallelism(metavar="FILE", help="A rules file that decides the candidate's layouts again.")
    ] = None,
) -> None:
    """Judge a recorded run again; nothing is run."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from ttrace.cli import outcome
    from ttrace.layouts.rules import Rules
    from ttrace.report.refusal import CleanConsole
    from ttrace.workflow.engines.select import open_engine
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run, Strictness, open_run

    given = None if rules is None else Rules.of(rules)
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    strictness = Strictness.load(margin, allow)
    reports = is_reporter(engine)
    console = CleanConsole(stderr=output.json, quiet=not reports)
    traces = open_run(where)
    run = traces if isinstance(traces, Run) else None
    if run is None and engine == "torchrun":  # its partial results are stored in the run's own folder
        raise TTraceError("--engine torchrun needs the traces in a folder: copy them from the store, or use another.")
    traces.check_complete()
    with (
        hold(run.folder) if run and reports else nullcontext(),
        outcome.assume_unjudged(run) if run and reports and engine == "torchrun" else nullcontext(),
    ):
        with (
            open_engine(engine, workers, traces, strictness) as chosen,
            outcome.show_progress("check", console, *rate) as progress,
        ):
            judgement = traces.judge(strictness, rules=given, progress=progress, engine=chosen)
        if reports:
            status = outcome.finish(traces, judgement, known, output, leaves_code=engine == "torchrun")
            raise typer.Exit(status)
