"""The command `ttrace trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options


def trace(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to trace.")],
    out: options.Out,
    reference: Annotated[Path | None, typer.Option(help="The reference's trace; makes this run a candidate.")] = None,
    twin: Annotated[int, typer.Option(min=0, help="With --reference: be the twin of this number.")] = 0,
    store: Annotated[
        str, typer.Option(help="A URL (s3://, gs://) under which traces are kept by name; --out has the log only.")
    ] = "",
    seed: options.Seed = 0,
    steps: options.Steps = 1,
    only: options.Only = [],  # noqa: B006  # typer reads the default and never changes it
    skip: options.Skip = [],  # noqa: B006
    record: options.Record = "auto",
    budget: options.Budget = 2.0,
    full: options.Full = [],  # noqa: B006
    own_parameters: options.OwnParameters = False,
    compiled: options.Compiled = "eager",
    microbatch_grads: options.MicrobatchGrads = False,
    forward_only: options.ForwardOnly = False,
    deterministic: options.Deterministic = False,
    attach: options.Attach = "auto",
    data: options.Data = "generated",
    mesh: options.Mesh = "",
    rules: options.RulesFile = None,
    port: options.PortMapFile = "",
    timeout: options.Timeout = 1800.0,
    json_output: options.Json = False,
) -> None:
    """Run one command and keep its trace.

    It is a reference, or a twin or candidate of one.
    """
    from ttrace.cli.plans import make_plan
    from ttrace.judge.verdict import Exit
    from ttrace.report.terminal import listing
    from ttrace.report.terminal.console import CleanConsole
    from ttrace.workflow.disk_space import DiskSpace
    from ttrace.workflow.stages import Stage

    settings = make_plan(
        out,
        seed=seed,
        steps=steps,
        only=only,
        skip=skip,
        record=record,
        budget=budget,
        full=full,
        own_parameters=own_parameters,
        compiled=compiled,
        microbatch_grads=microbatch_grads,
        forward_only=forward_only,
        deterministic=deterministic,
        attach=attach,
        data=data,
        mesh=mesh,
        rules=rules,
        port=port,
        store=store,
    )
    if reference is not None:
        if not store and not twin:
            DiskSpace.after(reference, out).check()
        role = "twin" if twin else "candidate"
        settings = settings.model_copy(update={"reference": reference.resolve(), "role": role, "twin": twin})
    Stage(tuple(command), settings).run(timeout=timeout)
    summary = listing.summarize(settings.written)
    if json_output:
        typer.echo(json.dumps(summary))
    else:
        what = f"{summary['tensors']} tensors of {summary['ranks']} ranks in {settings.written}"
        CleanConsole().print(what, soft_wrap=True)
        listing.show_problems(CleanConsole(), summary["problems"])
        if not store:
            CleanConsole().print(f"next: ttrace show {out}", highlight=False)
    if summary["problems"]:
        raise typer.Exit(Exit.UNJUDGED)
