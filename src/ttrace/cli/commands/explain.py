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

    Print the tolerance term by term, the layout and its source, and the tensors before it.
    """
    from ttrace.cli import outcome
    from ttrace.judge.explanation import explain as explain_verdict
    from ttrace.report.refusal import CleanConsole
    from ttrace.report.terminal import explain as report
    from ttrace.report.terminal import listing
    from ttrace.trace.reader import Trace
    from ttrace.workflow.run import Run, Strictness

    Run(folder).check_complete()
    detailed = Run(folder).most_detailed
    reference, candidate = Trace(detailed.reference), Trace(detailed.candidate)
    tensor_id = listing.find_id((reference, candidate), tensor, folder)
    with outcome.show_progress("check", CleanConsole(stderr=True)) as progress:
        judgement = Run(folder).judge(Strictness.load(margin, allow), progress=progress)
    explanation = explain_verdict(judgement, reference, candidate, tensor_id)
    if json_output:
        typer.echo(json.dumps(report.as_json(explanation)))
    else:
        report.show(outcome.console(), explanation, str(folder), margin)
