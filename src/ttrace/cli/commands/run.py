"""The command `ttrace run`."""

from __future__ import annotations

from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.errors import TTraceError
from ttrace.judge.margin import MARGIN


def run(
    reference: Annotated[str, typer.Option(help="The trusted command, e.g. 'python train.py'.")],
    candidate: Annotated[
        str, typer.Option(help="The command under test, e.g. 'torchrun --standalone --nproc-per-node 2 train.py'.")
    ],
    out: options.Out,
    resume: Annotated[
        str,
        typer.Option(
            help="A second command of the candidate, which loads the checkpoint that the first one has saved after all "
            "--steps but the last, and trains that one."
        ),
    ] = "",
    twins: options.Twins = 3,
    seed: options.Seed = 0,
    steps: options.Steps = 1,
    margin: options.Margin = MARGIN,
    only: options.Only = [],  # noqa: B006  # typer reads the default and never changes it
    skip: options.Skip = [],  # noqa: B006
    record: options.Record = "auto",
    budget: options.Budget = 2.0,
    full: options.Full = [],  # noqa: B006
    own_parameters: options.OwnParameters = False,
    isolate: Annotated[
        bool, typer.Option(help="When something is wrong, run again with every module's inputs generated.")
    ] = True,
    repeat: options.Repeat = True,
    compiled: options.Compiled = "eager",
    microbatch_grads: options.MicrobatchGrads = False,
    forward_only: options.ForwardOnly = False,
    deterministic: options.Deterministic = False,
    attach: options.Attach = "auto",
    data: options.Data = "generated",
    mesh: options.Mesh = "",
    rules: options.RulesFile = None,
    port: options.PortMapFile = "",
    allow: options.Allow = None,
    fail_on: options.FailOn = "unjudged",
    fresh: options.Fresh = False,
    timeout: options.Timeout = 1800.0,
    baseline: options.BaselineFile = None,
    update_baseline: options.UpdateBaseline = False,
    junit_file: options.Junit = None,
    json_output: options.Json = False,
) -> None:
    """Run both sides and find the first wrong tensor.

    Exit code: 0 every tensor agrees, 1 something is wrong, 2 no verdict.
    """
    from ttrace.cli import outcome
    from ttrace.cli.plans import make_plan
    from ttrace.cli.stage_lines import StageLines
    from ttrace.workflow.flow import Commands, Flow
    from ttrace.workflow.folder import hold
    from ttrace.workflow.investigation import Investigation
    from ttrace.workflow.launch import split_command
    from ttrace.workflow.run import Run, Strictness

    if resume and steps < 2:
        raise TTraceError("--resume needs --steps of at least 2: all but the last come before the checkpoint.")
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
        attach="script" if resume else attach,  # a script's own first step is not the first traced one
        data=data,
        mesh=mesh,
        rules=rules,
        port=port,
    )
    commands = Commands(
        split_command(reference), split_command(candidate), twins, timeout, split_command(resume) if resume else ()
    )
    lines = StageLines()
    flow = Flow(Run(out), commands, settings, on_stage=lines.on_stage, on_note=lines.on_note)
    # In isolation parameters are the reference's at step 0, not those of a checkpoint, and a cache is no input.
    isolates = isolate and not resume and not forward_only
    investigation = Investigation(flow, Strictness.load(margin, allow), repeats=repeat, isolates=isolates)
    flow.check_folder()
    with hold(out):
        with lines:
            flow.prepare(fresh=fresh)
            judgement = investigation.run()
        known = outcome.read_baseline(baseline, judgement, update=update_baseline)
        outcome.finish(flow.run, judgement, known, json_output=json_output, fail_on=fail_on, junit_file=junit_file)
