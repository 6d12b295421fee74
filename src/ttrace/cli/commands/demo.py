"""The command `ttrace demo`."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ttrace.errors import TTraceError

if TYPE_CHECKING:
    from ttrace.judge.verdict import Judgement
    from ttrace.workflow.flow import Flow

SCRIPT, FOLDER = "ttrace_demo.py", "ttrace-demo"
_NUM_TWINS, _TIMEOUT = 3, 600.0


def demo() -> None:
    """Write a small training script into this folder, and check it without and with a bug.

    Exit code: 0 the script passed and its bug was found, 2 otherwise.
    """
    from ttrace.judge.verdict import Exit
    from ttrace.workflow.run import PAGE

    write_script(Path(SCRIPT))
    clean, bug = _make_flow("clean"), _make_flow("bug", "--bug")
    _say(
        f"{SCRIPT}, now in this folder, trains a small language model. It does not mention TTrace.",
        "In one process it is the reference, which you trust. In two processes, with DDP, it is the candidate, which",
        "is checked: once as it is, and once with --bug, where DDP averages gradients too early. By hand, type:",
        "",
        f"$ {_spell_command(clean)}",
        f"$ {_spell_command(bug)} --no-repeat --no-isolate",
        "",
        "This takes half a minute. Twins are repetitions of the reference that measure rounding errors.",
        "",
    )
    clean_result, bug_result = _run_both(clean, bug)
    _say("", "1. As it is:", "")
    _report(clean, clean_result)
    _say("", "2. With --bug:", "")
    _report(bug, bug_result)
    if (clean_result.exit, bug_result.exit) != (Exit.PASSED, Exit.FOUND):
        raise TTraceError(
            "the demo should pass as it is, and be wrong with --bug. Please report this, with the output above and "
            "that of `ttrace doctor`."
        )
    _say(
        "",
        "✓ The script passed, and its bug was found. The loss of the step is right in both cases.",
        "",
        f"The bug is in {SCRIPT}, in the line that calls average_gradients.",
        f"Open {bug.run.folder / PAGE} in a browser: it shows the second result with plots.",
        "",
        "Now check your own script, as it is. Both sides must train on the same global batch, for two steps or more",
        "(docs/howto/unchanged.md, ttrace run --help):",
        "",
        '$ ttrace run --reference "python train.py" '
        '--candidate "torchrun --standalone --nproc-per-node 2 train.py" --out runs/first',
    )


def write_script(path: Path) -> None:
    """Write the demo's script; refuse to overwrite another file."""
    text = resources.files("ttrace.cli").joinpath("scripts", SCRIPT).read_bytes()
    try:
        if not path.exists():
            path.write_bytes(text)
        is_other = path.read_bytes() != text
    except OSError as error:
        raise TTraceError(f"{path} cannot be written: {error}. Run `ttrace demo` in another folder.") from None
    if is_other:
        raise TTraceError(
            f"{path} exists here, and is not the demo's script. Move it, or run `ttrace demo` in another folder."
        )


def make_commands() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands of reference and candidate: short if the shell finds this Python and its torchrun."""
    python = "python" if _is_beside_python("python") else sys.executable
    launcher = ("torchrun",) if _is_beside_python("torchrun") else (python, "-m", "torch.distributed.run")
    return (python, SCRIPT), (*launcher, "--standalone", "--nproc-per-node", "2", SCRIPT)


def _is_beside_python(name: str) -> bool:
    path = shutil.which(name)
    return path is not None and Path(path).parent == Path(sys.executable).parent


def _make_flow(name: str, *arguments: str) -> Flow:
    from ttrace.capture.plan import Plan
    from ttrace.workflow.flow import Commands, Flow
    from ttrace.workflow.run import Run

    run = Run(Path(FOLDER, name))
    reference, candidate = make_commands()
    flow = Flow(run, Commands(reference, (*candidate, *arguments), _NUM_TWINS, _TIMEOUT), Plan(out=run.folder))
    flow.check_folder()
    return flow


def _run_both(clean: Flow, bug: Flow) -> tuple[Judgement, Judgement]:
    """Trace and judge as `ttrace run` does, but with one reference for both, and the candidates at the same time."""
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    from ttrace.cli.outcome import StageLines
    from ttrace.workflow.folder import hold
    from ttrace.workflow.investigation import Investigation
    from ttrace.workflow.launch import Launches

    launches, flows = Launches(), (clean, bug)
    with hold(clean.run.folder), hold(bug.run.folder), StageLines() as lines, ThreadPoolExecutor(2) as pool:
        for flow in flows:
            flow.prepare(fresh=True)
        try:
            replace(clean, on_stage=lines.on_stage, on_note=lines.on_note).trace_references()
            bug.run.copy_references(clean.run)
            lines.on_stage("both candidates")
            for traced in [pool.submit(replace(flow, launches=launches).trace_candidate) for flow in flows]:
                traced.result()
        finally:
            launches.close()  # threads end when what they wait for does
        lines.on_stage("check")
        clean_result, bug_result = (Investigation(flow, repeats=False, isolates=False).judge() for flow in flows)
        return clean_result, bug_result


def _report(flow: Flow, judgement: Judgement) -> None:
    """Write and print what `ttrace run` would."""
    from ttrace.cli import outcome
    from ttrace.cli.outcome import console
    from ttrace.report.terminal import summary
    from ttrace.workflow.run import PAGE

    next_command = flow.run.next_command(judgement)
    outcome.write(flow.run, judgement, next_command)
    summary.show(console(), judgement, next_command, flow.run.folder / PAGE)


def _spell_command(flow: Flow) -> str:
    reference, candidate = shlex.join(flow.commands.reference), shlex.join(flow.commands.candidate)
    return f'ttrace run --reference "{reference}" --candidate "{candidate}" --out {flow.run.folder}'


def _say(*lines: str) -> None:
    for line in lines:
        typer.echo(line)
