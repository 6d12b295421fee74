"""Training loops as scripts have them, run in this process below a watch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from ttrace.attach import PLAN_VARIABLE
from ttrace.automatic.watch import Watch
from ttrace.capture.plan import Plan
from ttrace.trace.reader import Trace


def trace_loop(folder: Path, loop: Callable[[], object], **settings: object) -> Trace:
    """Run a loop as `ttrace` would run a script that does not attach, and return the trace of its second step."""
    problems = watch_loop(folder, loop, **settings)
    assert not problems
    return Trace(folder / "trace")


def watch_loop(folder: Path, loop: Callable[[], object], **settings: object) -> list[str]:
    """Do the same, and return the reason if nothing was traced."""
    Plan.model_validate({"out": folder / "trace", "stop": False, **settings}).save(folder / "plan.json")
    problems: list[str] = []
    with mock.patch.dict(os.environ, {PLAN_VARIABLE: str(folder / "plan.json")}):
        watch = Watch(problems.append)
        watch.start()
        try:
            loop()
        finally:
            watch.close()
    return problems
