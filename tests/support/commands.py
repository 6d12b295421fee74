"""The command line, run as a user runs it, and small scripts to run with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zoo.harness.limits import HANG

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent


def ttrace(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        ["ttrace", *args], capture_output=True, text=True, cwd=cwd, env=environment, timeout=HANG, check=False
    )


def run_example(name: str, out: Path, *flags: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script = f"examples/{name}.py"
    candidate = f"torchrun --standalone --nproc-per-node 2 {script} {' '.join(flags)}"
    return ttrace("run", "--reference", f"python {script}", "--candidate", candidate, "--out", str(out), *more)


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(body)
    return f"python {path}"


TINY = """
import torch, ttrace
model = torch.nn.Linear(4, 4)
session = ttrace.attach(model)
with session.step():
    model(session.batch(torch.randn(2, 4))).sum().backward()
print("never reached while traced")
"""


HOLDABLE = """
import os, sys, time, torch, ttrace
from pathlib import Path
from part import SIZE
print("started", flush=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(SIZE, 8), torch.nn.Linear(8, SIZE))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "wrong" in sys.argv:
    model[1].weight.register_hook(lambda grad: 2 * grad)
session = ttrace.attach(model, optimizer)
hold, plan = Path(__file__).with_name("hold"), Path(os.environ["TTRACE_PLAN"].partition("#")[0]).name
for number in range(8):
    with session.step():
        while hold.exists() and plan == f"{hold.read_text()}.plan.json":
            print("waiting", flush=True)
            time.sleep(0.1)
        if "changing" in sys.argv:
            model[0].weight.data.mul_(1 + number)
        optimizer.zero_grad()
        model(session.batch(torch.randn(4, SIZE))).square().mean().backward()
        optimizer.step()
"""
"""Trains until a file `hold` names the stage that it is launched for; then it waits."""
