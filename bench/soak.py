"""Whether a traced run may last: 20,000 steps, every one of them recorded, and what stays behind of each.

A small model is trained by one process. After the first thousand steps nothing may grow: not the memory, not the open
files, and not the Python objects, of which a few per step would be the first sign of a leak.
"""

from __future__ import annotations

import gc
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession

NUM_STEPS, NUM_WARM, EVERY = 20_000, 1_000, 4_000
MOST_BYTES, MOST_OBJECTS = 32 << 20, 1_000
"""The bars of what may be there at the end beyond what was there after the first steps; no file may be."""


class Usage(NamedTuple):
    """What a process holds."""

    num_bytes: int
    num_files: int
    num_objects: int

    @classmethod
    def measure(cls) -> Usage:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
        return cls(pages * resource.getpagesize(), files, len(gc.get_objects()))


def run(out: Path, num_steps: int, num_warm: int) -> tuple[Usage, Usage]:
    """Train and trace; return what the process held after the first steps, and at the end."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = Plan.model_validate({"out": out, "num_steps": num_steps, "stop": False})
    session = TracingSession(SessionParts(plan, model, optimizer, Native([model])))
    before, start = Usage(0, 0, 0), time.monotonic()
    for step in range(num_steps):
        if step == num_warm:
            before = Usage.measure()
        with session.step():
            inputs = session.batch(torch.randn(2, 4))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == num_steps - 2:
            after = Usage.measure()
        if step % EVERY == EVERY - 1:
            print(f"{step + 1} steps in {time.monotonic() - start:.0f} s: {Usage.measure()}", flush=True)
    return before, after


def main(option: str = "") -> int:
    num_steps, num_warm = (NUM_STEPS // 10, NUM_WARM // 10) if option == "--quick" else (NUM_STEPS, NUM_WARM)
    folder = Path(tempfile.mkdtemp(prefix="ttrace-soak-"))
    try:
        before, after = run(folder / "trace", num_steps, num_warm)
    finally:
        shutil.rmtree(folder)
    grown = Usage(*(then - now for then, now in zip(after, before, strict=True)))
    print(
        f"soak: {num_steps:,} traced steps: {grown.num_bytes / 2**20:+.1f} MiB, {grown.num_files:+d} files, "
        f"{grown.num_objects:+d} Python objects (bars {MOST_BYTES >> 20} MiB, 0 and {MOST_OBJECTS})"
    )
    return int(grown.num_bytes > MOST_BYTES or grown.num_files > 0 or grown.num_objects > MOST_OBJECTS)
