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
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Write the verdict and the curves as TensorBoard events there.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option("--wandb", help="Log the verdict, the curves and the report to this W&B project.")
    ] = None,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
) -> None:
    """Write the HTML report of a run again, its step over time, or what other tools show."""
    from rich.text import Text

    from ttrace.cli import outcome
    from ttrace.report.machine.perfetto import write_perfetto
    from ttrace.report.machine.trackers import log_wandb, write_tensorboard
    from ttrace.report.refusal import CleanConsole
    from ttrace.report.terminal.summary import render_text
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run, Strictness, open_trace

    run = Run(folder)
    run.check_complete()
    done: list[str] = []
    with hold(folder):
        with outcome.show_progress("check", CleanConsole(stderr=True)) as progress:
            judgement = run.judge(Strictness.load(margin, allow), progress=progress)
        if perfetto is None or out is not None or tensorboard is not None or wandb is not None:
            page = outcome.write_page(run, judgement, out)
            done.append(f"report: {page}")
        if perfetto is not None:
            write_perfetto(perfetto, judgement, open_trace(run.most_detailed.candidate))
            done.append(f"perfetto: {perfetto} (open it in https://ui.perfetto.dev)")
        text = render_text(judgement, run.next_command(judgement))
        if tensorboard is not None:
            write_tensorboard(tensorboard, judgement, text, page)
            done.append(f"tensorboard: {tensorboard} (tensorboard --logdir {tensorboard})")
        if wandb is not None:
            done.append(f"wandb: {log_wandb(wandb, folder, judgement, text, page)}")
    for line in done:
        outcome.console().print(Text(line), soft_wrap=True)
