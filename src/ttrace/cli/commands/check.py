"""The command `ttrace check`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ttrace.cli.completion import complete_run
from ttrace.cli.options import Allow, KnownFindings, Margin, Output, common, parallelism
from ttrace.errors import TTraceError
from ttrace.judge.margin import MARGIN

if TYPE_CHECKING:
    from ttrace.judge.engine import Engine


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
        Literal["threads", "torchrun"], common(help="Where to compare: in threads here, or in this torchrun job.")
    ] = "threads",
    workers: Annotated[int, common(min=0, help="The number of threads; 0 means one per core, up to eight.")] = 0,
    rules: Annotated[
        Path | None, parallelism(metavar="FILE", help="A rules file that decides the candidate's layouts again.")
    ] = None,
) -> None:
    """Judge a recorded run again; nothing is run."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from ttrace.cli import outcome
    from ttrace.judge.engine import Threads, count_cores
    from ttrace.layouts.rules import Rules
    from ttrace.report.refusal import CleanConsole
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run, Strictness, open_run

    given = None if rules is None else Rules.of(rules)
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    strictness = Strictness.load(margin, allow)
    is_job = engine == "torchrun"
    reports = not is_job or os.environ.get("RANK", "0") == "0"  # of a job only the first rank reports
    console = CleanConsole(stderr=output.json, quiet=not reports)
    traces = open_run(where)
    run = traces if isinstance(traces, Run) else None
    opened: AbstractContextManager[Engine] = nullcontext(Threads(workers or count_cores()))
    if is_job:
        if run is None:  # its partial results are stored in the run's own folder
            raise TTraceError("--engine torchrun needs the traces in a folder: copy them from the store.")
        from ttrace.workflow.engines.torchrun import open_job

        opened = open_job(run, strictness)
    traces.check_complete()
    with (
        hold(run.folder) if run and reports else nullcontext(),
        outcome.assume_unjudged(run) if run and reports and is_job else nullcontext(),
    ):
        with opened as chosen, outcome.show_progress("check", console, *rate) as progress:
            judgement = traces.judge(strictness, rules=given, progress=progress, engine=chosen)
        if reports:
            status = outcome.finish(traces, judgement, known, output, leaves_code=is_job)
            raise typer.Exit(status)
