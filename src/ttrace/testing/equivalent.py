"""Assertion that training on several ranks is equivalent to training on one."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ttrace.capture.plan import Plan
from ttrace.judge.margin import MARGIN
from ttrace.judge.verdict import Exit
from ttrace.report.terminal.summary import render_text
from ttrace.testing.call import Function, FunctionCall
from ttrace.workflow.flow import Commands, Flow
from ttrace.workflow.folder import hold
from ttrace.workflow.investigation import Investigation
from ttrace.workflow.run import Run, Strictness


def assert_equivalent(
    candidate: Function,
    reference: Function | None = None,
    *,
    ranks: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: str = "cpu",
    out: Path | None = None,
    twins: int = 3,
    steps: int = 1,
    margin: float = MARGIN,
    allow: Path | None = None,
    repeat: bool = True,
    isolate: bool = False,
    timeout: float = 600.0,
) -> None:
    """Call a function on several ranks, and once on a single one, and compare what they trained.

    Both are functions of a module's top level that train a model and call `ttrace.attach`; without a `reference` it is
    the same function. They are called inside a process group, in processes of their own: gloo, or
    what torch has for `device`. Raises AssertionError with the finding. Without `out`, only a failure keeps its traces.
    """
    __tracebackhide__ = True  # what pytest shows is the test's own line and the finding
    folder = out or Path(tempfile.mkdtemp(prefix="ttrace-"))
    with ExitStack() as cleanup:
        if out is None:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        run = Run(folder)
        commands = Commands(
            _make_command(folder / "reference.call", FunctionCall.of(reference or candidate, args, kwargs), 1, device),
            _make_command(folder / "candidate.call", FunctionCall.of(candidate, args, kwargs), ranks, device),
            twins,
            timeout,
        )
        investigation = Investigation(
            Flow(run, commands, Plan(out=folder, num_steps=steps)),
            Strictness.load(margin, allow),
            repeats=repeat,
            isolates=isolate,
        )
        removal = cleanup.pop_all()  # from here on a failure has traces and logs to look at
    with hold(folder):
        judgement = investigation.run()
    if judgement.exit is not Exit.PASSED:
        raise AssertionError(render_text(judgement, run.next_command(judgement)).strip())
    removal.close()


def _make_command(file: Path, call: FunctionCall, ranks: int, device: str) -> tuple[str, ...]:
    call.save(file)
    rank = ("-m", "ttrace.testing.rank", str(file), device)
    if ranks == 1:
        return (sys.executable, *rank)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return (sys.executable, *launcher, *rank)
