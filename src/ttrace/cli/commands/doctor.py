"""The command `ttrace doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options


def doctor(
    out: Annotated[
        Path, typer.Option("--out", help="The folder for traces, whose disk is measured. It need not exist.")
    ] = Path(),
    timeout: Annotated[float, typer.Option(help="Seconds that the launch by torchrun may take.")] = 120.0,
    json_output: options.Json = False,
) -> None:
    """Check that everything TTrace needs works here.

    Print versions, what is off and why, kernels, accelerators, the disk, and whether torchrun starts two ranks.
    """
    from ttrace.cli import outcome
    from ttrace.report.refusal import CleanConsole
    from ttrace.report.terminal import doctor as report
    from ttrace.workflow.doctor.examination import examine

    with outcome.show_progress("doctor", CleanConsole(stderr=True)):
        health = examine(out, timeout)
    if json_output:
        typer.echo(json.dumps(report.as_json(health)))
    else:
        report.show(outcome.console(), health)
    raise typer.Exit(health.exit)
