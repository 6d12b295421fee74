"""The command `ttrace diff`."""

from __future__ import annotations

import json

import typer

from ttrace.cli import options


def diff(
    folder: options.RunFolder,
    tensor: options.Tensor,
    json_output: options.Json = False,
) -> None:
    """Show how one tensor differs from the reference."""
    from ttrace.cli import outcome
    from ttrace.judge.tensors.difference import find_difference
    from ttrace.report.terminal import difference as difference_report
    from ttrace.report.terminal import listing
    from ttrace.trace.reader import Trace
    from ttrace.workflow.run import Run, check_side

    Run(folder).check_complete()
    run = Run(folder).most_detailed
    reference, candidate = Trace(run.reference), Trace(run.candidate)
    check_side(reference, "reference")
    check_side(candidate, "candidate")
    difference = find_difference(reference, candidate, listing.find_id((reference, candidate), tensor, folder))
    if json_output:
        typer.echo(json.dumps(difference_report.as_json(difference)))
    else:
        difference_report.show(outcome.console(), difference, str(folder))
