"""The command `ttrace explain`."""

from __future__ import annotations

import json

import typer

from ttrace.cli import options
from ttrace.judge.margin import MARGIN


def explain(
    folder: options.RunFolder,
    tensor: options.Tensor,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
    json_output: options.Json = False,
) -> None:
    """Explain the verdict of one tensor.

    Print the tolerance term by term, the layout and who decided it, and the tensors before it.
    """
    from ttrace.cli import screen
    from ttrace.judge.explanation import explain as explain_verdict
    from ttrace.report.terminal import explain as report
    from ttrace.report.terminal import listing
    from ttrace.report.terminal.console import CleanConsole
    from ttrace.trace.reader import Trace
    from ttrace.workflow.run import Run, Strictness

    Run(folder).check_complete()
    detailed = Run(folder).most_detailed
    reference, candidate = Trace(detailed.reference), Trace(detailed.candidate)
    tensor_id = listing.find_id((reference, candidate), tensor, folder)
    with screen.show_progress("check", CleanConsole(stderr=True)) as progress:
        judgement = Run(folder).judge(Strictness.load(margin, allow), progress=progress)
    found = explain_verdict(judgement, reference, candidate, tensor_id)
    if json_output:
        typer.echo(json.dumps(report.as_json(found)))
    else:
        report.show(screen.console(), found, str(folder), margin)
