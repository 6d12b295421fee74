"""The command `ttrace check`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.cli.completion import complete_run
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
    engine: Annotated[
        EngineName,
        typer.Option(help="Where to compare: in threads or processes here, in this job of torchrun, or on Ray."),
    ] = "threads",
    workers: Annotated[int, typer.Option(min=0, help="How many compare; 0: one per core, up to eight.")] = 0,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", help="A rules file that decides the candidate's layouts again.")
    ] = None,
    fail_on: options.FailOn = "unjudged",
    baseline: options.BaselineFile = None,
    update_baseline: options.UpdateBaseline = False,
    junit_file: options.Junit = None,
    json_output: options.Json = False,
) -> None:
    """Judge a recorded run again; nothing is run."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from ttrace.cli import outcome, screen
    from ttrace.layouts.rules import Rules
    from ttrace.report.terminal.console import CleanConsole
    from ttrace.trace.store import Remote, parse_place
    from ttrace.workflow import stored
    from ttrace.workflow.engines.select import open_engine
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run, Strictness

    given = None if rules is None else Rules.of(rules)
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    strictness = Strictness.load(margin, allow)
    reports = is_reporter(engine)
    console = CleanConsole(stderr=json_output, quiet=not reports)
    folder = parse_place(where)
    if isinstance(folder, Remote) and engine == "torchrun":  # its partial results lie in the run's own folder
        raise TTraceError("--engine torchrun needs the traces in a folder: copy them from the store, or use another.")
    run = Run(folder if isinstance(folder, Path) else Path())  # for traces in a store, the report is written here
    if isinstance(folder, Path):
        run.check_complete()
    with (
        hold(run.folder) if reports and isinstance(folder, Path) else nullcontext(),
        outcome.assume_unjudged(run) if reports and engine == "torchrun" else nullcontext(),
    ):
        with (
            open_engine(engine, workers, run, strictness) as chosen,
            screen.show_progress("check", console, *rate) as progress,
        ):
            if isinstance(folder, Path):
                judgement = run.judge(strictness, rules=given, progress=progress, engine=chosen)
            elif given is not None:
                raise TTraceError("--rules needs the traces in a folder: copy them from the store first.")
            else:
                judgement = stored.judge(folder, strictness, progress=progress, engine=chosen)
        if reports:
            known = outcome.read_baseline(baseline, judgement, update=update_baseline)
            outcome.finish(
                run,
                judgement,
                known,
                json_output=json_output,
                fail_on=fail_on,
                junit_file=junit_file,
                is_stored=isinstance(folder, Remote),
                leaves_code=engine == "torchrun",
            )
