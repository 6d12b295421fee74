"""How time, memory and disk grow with the size of a model and with the number of ranks.

Sizes: four square weights in float32, 64 tokens, SGD, recorded in full, from 10^6 parameters to 10^8, or 10^9 with
`--all`; each size in its own process. Capture is a traced step over a bare one; its memory is what it takes beyond the
bare step. The check estimates tolerances from one twin and judges a candidate of one rank; its memory does not count
the files that it maps. Ranks: traces of jobs of 2 to 16,384 ranks, as in `bench wide`, opened and planned for a check.

A slope is the exponent over the whole range: 1 is in proportion. `--all` also draws the figure of the docs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from bench import wide
from bench._figures import draw_growth
from bench._memory import anonymous
from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import judge_candidate
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Exit
from ttrace.trace.reader import Trace

SLOPE, MEMORY = 1.0, 512 << 20
"""The bars: of all slopes, and of the check's memory at any size."""
SIZES, LARGEST = (10**6, 10**7, 10**8), 10**9
RANKS = (2, 16, 128, 1024, 16384)
DEPTH, TOKENS = 4, 64
_SLOPES = ("traced step s", "check s", "disk bytes")

Row = Mapping[str, float]


def measure_size(num_parameters: int, folder: Path) -> dict[str, float]:
    """Trace and check a model of about this size."""
    width = round(math.sqrt(num_parameters / DEPTH))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(TOKENS, width)

    def step(data: torch.Tensor = x) -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def trace(**settings: object) -> None:
        plan = Plan.model_validate({"stop": False, "record": "full", **settings})
        session = TracingSession(SessionParts(plan, model, optimizer, Native([model])))
        with session.step():
            step(session.batch(x))

    step()  # what happens once in a process
    reference, twin, candidate = (folder / name for name in ("reference", "twin-1", "candidate"))
    bare, bare_memory = _measure(step)
    traced, memory = _measure(lambda: trace(out=reference))
    trace(out=twin, role="twin", reference=reference, twin=1)
    trace(out=candidate, role="candidate", reference=reference)

    def check() -> None:
        rounding = ToleranceModel.measure(Trace(reference), [Trace(twin)])
        judgement = judge_candidate(rounding, Trace(candidate))
        assert judgement.exit is Exit.PASSED, (judgement.problems, judgement.findings)

    checked, check_memory = _measure(check)
    return {
        "parameters": DEPTH * width * width,
        "bare step s": bare,
        "traced step s": traced,
        "check s": checked,
        "disk bytes": sum(path.stat().st_size for path in reference.rglob("*") if path.is_file()),
        "capture memory": max(memory - bare_memory, 0),
        "check memory": check_memory,
    }


def _measure(run: Callable[[], object]) -> tuple[float, int]:
    with anonymous() as peak:
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
    return seconds, peak.beyond


def measure_ranks(num_ranks: int, folder: Path) -> dict[str, float]:
    wide.write(folder, num_ranks)
    return wide.plan(folder)


def find_slope(rows: Sequence[Row], by: str, what: str) -> float:
    first, last = rows[0], rows[-1]
    return math.log(last[what] / first[what]) / math.log(last[by] / first[by])


def main(option: str = "") -> int:
    sizes = (*SIZES, LARGEST) if option else SIZES
    by_size = [_run_alone("measure_size", size) for size in sizes]
    for row in by_size:
        print(
            f"{row['parameters']:.0e} parameters: step {row['bare step s']:.2f} s, traced {row['traced step s']:.2f} s "
            f"and {row['capture memory'] / 2**20:.0f} MiB more, {row['disk bytes'] / 1e6:.0f} MB; check "
            f"{row['check s']:.2f} s, {row['check memory'] / 2**20:.0f} MiB",
            flush=True,
        )
    by_ranks = [_run_alone("measure_ranks", num_ranks) for num_ranks in RANKS]
    for row in by_ranks:
        print(
            f"{row['ranks']:>6.0f} ranks: planned in {row['seconds']:.2f} s, {row['bytes'] / 2**20:.0f} MiB", flush=True
        )
    if option:
        draw_growth("growth", by_size, by_ranks)
    slopes = {what: find_slope(by_size, "parameters", what) for what in _SLOPES}
    slopes["planning s"] = find_slope(by_ranks, "ranks", "seconds")
    most = max(row["check memory"] for row in by_size)
    words = ", ".join(f"{what.removesuffix(' s')} {slope:.2f}" for what, slope in slopes.items())
    print(f"growth: slopes {words} (bar {SLOPE:.1f}); check at most {most / 2**20:.0f} MiB (bar {MEMORY >> 20} MiB)")
    return int(max(slopes.values()) > SLOPE or most > MEMORY)


def _run_alone(function: str, size: int) -> dict[str, float]:
    """Run a function of this file in a process of its own, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import json, pathlib, sys, bench.growth as g; "
            f"print(json.dumps(g.{function}({size}, pathlib.Path(sys.argv[1]))))"
        )
        done = subprocess.run([sys.executable, "-c", code, folder], check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found
