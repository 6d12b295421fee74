"""Runs of two ranks and two layers, written without training, and changed as somebody might."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.traces import Case, draw_tensor
from ttrace.capture.plan import Plan
from ttrace.trace.seal import seal_document
from ttrace.workflow.flow import Commands, Flow
from ttrace.workflow.run import Run

RANK = "rank-00000"
OUTPUTS = ("0/0/fc1/output", "0/0/fc2/output")


def write_run(folder: Path, *, wrong: bool) -> Run:
    """Traces of one step of two layers on two ranks; with `wrong`, the second layer's output is."""
    Flow(Run(folder), Commands(("true",), ("true",), 1, 60.0), Plan(out=folder)).prepare()
    case = Case(folder)
    for number, name in enumerate(OUTPUTS):
        change = (lambda x: 1.5 * x) if wrong and number == 1 else None
        case.add(name, draw_tensor(16, 8, seed=number), "t h/tp", change)
        case.add(f"0/-/fc{number}.weight/param", draw_tensor(8, 8, seed=9), "o/tp i", noise=0.0)
        case.add(f"0/-/fc{number}.weight/param_grad", draw_tensor(8, 8, seed=number + 5), "o/tp i")
    for builder in (case.reference, case.twin, case.candidate):
        builder.close()
    return Run(folder)


def change_document(path: Path, **changes: Any) -> None:
    """Change a sealed document, and seal it again."""
    document = json.loads(path.read_text())
    del document["sum"]
    path.write_text(seal_document(json.dumps({**document, **changes}, indent=1)))
