"""The command `ttrace selftest`."""

from __future__ import annotations

import json

import typer

from ttrace.cli import options
from ttrace.judge.margin import MARGIN


def selftest(folder: options.RunFolder, margin: options.Margin = MARGIN, json_output: options.Json = False) -> None:
    """Measure which faults a clean run would reveal.

    Known faults are put into copies of the recorded tensors, in memory.
    """
    from ttrace.cli import outcome
    from ttrace.report.refusal import CleanConsole
    from ttrace.report.terminal import selftest as selftest_report
    from ttrace.workflow.run import Run

    with outcome.show_progress("selftest", CleanConsole(stderr=json_output)) as progress:
        result = Run(folder).selftest(margin=margin, progress=progress)
    if json_output:
        typer.echo(json.dumps(selftest_report.as_json(result)))
    else:
        selftest_report.show(outcome.console(), result)
    raise typer.Exit(int(result.exit))
