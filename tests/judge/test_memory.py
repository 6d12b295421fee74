"""The memory of a check does not grow with the largest tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT
from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from zoo.harness.limits import HANG

WIDTH = 10_000
"""Of the only weight, which has 10^8 elements."""
LIMIT = 512 << 20

CHECK = """
import sys
from pathlib import Path
from bench._memory import anonymous
from ttrace.judge.check import check
from ttrace.trace.reader import Trace
reference, twin, candidate = (Trace(Path(sys.argv[1]) / name) for name in ("reference", "twin-1", "candidate"))
with anonymous() as peak:
    judgement = check(reference, [twin], candidate)
print(judgement.exit.value, peak.beyond)
print(judgement.findings[0].cause.sentence if judgement.findings else "")
"""


def trace(folder: Path, name: str, *, is_moved: bool = False) -> None:
    """Trace a step on one weight; with `is_moved`, its gradient has its rows in another place."""
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if is_moved:
        model.weight.register_hook(lambda gradient: gradient.roll(3, 0))
    reference = {} if name == "reference" else {"role": name.split("-")[0], "reference": folder / "reference"}
    twin = {"twin": 1} if name == "twin-1" else {}
    plan = Plan.model_validate({"out": folder / name, "stop": False, "record": "full", **reference, **twin})
    session = TracingSession(SessionParts(plan, model, optimizer, Native([model])))
    with session.step():
        model(session.batch(torch.randn(8, WIDTH))).square().mean().backward()
        optimizer.step()


def check(folder: Path) -> tuple[int, int, str]:
    """Check in a process of its own; return its exit code, its memory beside mapped files, and the first cause."""
    command = [sys.executable, "-c", CHECK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=ROOT, check=True)
    numbers, sentence = done.stdout.splitlines()
    exit_, memory = map(int, numbers.split())
    return exit_, memory, sentence


@pytest.mark.slow
def test_a_parameter_of_10_to_the_8_elements_is_checked_in_little_memory(tmp_path: Path) -> None:
    for name in ("reference", "twin-1", "candidate"):
        trace(tmp_path, name)
    exit_, memory, sentence = check(tmp_path)
    assert (exit_, sentence) == (0, "")
    assert memory <= LIMIT

    trace(tmp_path, "candidate", is_moved=True)
    exit_, memory, sentence = check(tmp_path)
    assert exit_ == 1
    assert sentence == "the right values in the wrong place along dim 0: shifted by 3"
    assert memory <= LIMIT
