"""The command `ttrace run`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ttrace.cli.options import Effort, KnownFindings, Out, Output, Recording, common
from ttrace.errors import TTraceError


def run(
    reference: Annotated[str, common(metavar="CMD", help="The trusted command, e.g. 'python train.py'.")],
    candidate: Annotated[
        str,
        common(metavar="CMD", help="The command under test, e.g. 'torchrun --standalone --nproc-per-node 2 train.py'."),
    ],
    out: Out,
    recording: Recording,
    effort: Effort,
    known: KnownFindings,
    output: Output,
    resume: Annotated[
        str,
        common(
            metavar="CMD",
            help="A second command of the candidate: it loads the checkpoint that the first one saved before the last "
            "step, and trains the last step.",
        ),
    ] = "",
) -> None:
    """Run both sides and find the first wrong tensor.

    Exit code: 0 every tensor agrees, 1 something is wrong, 2 no verdict.
    """
    from ttrace.cli import outcome
    from ttrace.cli.options import make_plan
    from ttrace.workflow.flow import Commands, Flow
    from ttrace.workflow.folder import hold
    from ttrace.workflow.investigation import Investigation
    from ttrace.workflow.launch import split_command
    from ttrace.workflow.run import Run, Strictness

    if resume and recording.steps < 2:
        raise TTraceError("--resume needs --steps of at least 2: all but the last come before the checkpoint.")
    if resume:  # the first step of the second command is not the first traced one, so attach must not look for it
        recording = replace(recording, attach="script")
    commands = Commands(
        split_command(reference),
        split_command(candidate),
        effort.twins,
        effort.timeout,
        split_command(resume) if resume else (),
    )
    lines = outcome.StageLines()
    flow = Flow(Run(out), commands, make_plan(out, recording), on_stage=lines.on_stage, on_note=lines.on_note)
    # In isolation parameters are the reference's at step 0, not those of a checkpoint, and a cache is not an input.
    isolates = effort.isolate and not resume and not recording.forward_only
    strictness = Strictness.load(effort.margin, effort.allow)
    investigation = Investigation(flow, strictness, repeats=effort.repeat, isolates=isolates)
    flow.check_folder()
    with hold(out):
        with lines:
            flow.prepare(fresh=effort.fresh)
            judgement = investigation.run()
        status = outcome.finish(flow.run, judgement, known, output)
    raise typer.Exit(status)
