"""The command `ttrace trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli.options import Json, Out, Recording, Timeout, common


def trace(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to trace.")],
    out: Out,
    recording: Recording,
    reference: Annotated[
        Path | None, common(metavar="TRACE", help="The reference's trace; makes this run a candidate.")
    ] = None,
    twin: Annotated[int, common(min=0, help="With --reference: trace the twin of this number instead.")] = 0,
    store: Annotated[
        str,
        common(metavar="URL", help="Store traces by name below this URL (s3://, gs://); --out then has only the log."),
    ] = "",
    timeout: Timeout = 1800.0,
    json_output: Json = False,
) -> None:
    """Run one command and keep its trace.

    It is a reference, or a twin or candidate of one.
    """
    from ttrace.cli.options import make_plan
    from ttrace.judge.verdict import Exit
    from ttrace.report.refusal import CleanConsole
    from ttrace.report.terminal import listing
    from ttrace.workflow.folder import DiskSpace
    from ttrace.workflow.stages import Stage, change

    plan = make_plan(out, recording, store=store)
    if reference is not None:
        if not store and not twin:
            DiskSpace.after(reference, out).check()
        plan = change(plan, reference=reference.resolve(), role="twin" if twin else "candidate", twin=twin)
    Stage(tuple(command), plan).run(timeout=timeout)
    summary = listing.summarize(plan.written)
    if json_output:
        typer.echo(json.dumps(summary))
    else:
        what = f"{summary['tensors']} tensors of {summary['ranks']} ranks in {plan.written}"
        CleanConsole().print(what, soft_wrap=True)
        listing.show_problems(CleanConsole(), summary["problems"])
        if not store:
            CleanConsole().print(f"next: ttrace show {out}", highlight=False)
    if summary["problems"]:
        raise typer.Exit(Exit.UNJUDGED)
