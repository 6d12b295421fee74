"""The process of `python -m bench device`."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ttrace.attach import DisabledSession
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.trace.tensor_bytes import PinnedChunk
from zoo.harness.candidate import accumulated
from zoo.harness.runs import SimulatedRank
from zoo.harness.transformer import Shape, Transformer

EMU: Any = torch.emu  # type: ignore[attr-defined]
SHAPE = Shape(vocab=512, hidden=128, ffn=256, length=64)
LAGS = (0, 1000)
WAITS_PER_STEP, WAITS_PER_CHUNK = 1, 1
"""The bars: waits of the threads that train, and of the thread that writes."""
LIMITS = (64 << 20, 2 << 20)
"""Of memory that recording may hold: plenty, and so little that large tensors need several chunks."""
NUM_STEPS = 3


class Steps:
    """Steps of a model on the device, with what the host and the device did in each."""

    def __init__(self, plan: Plan | None) -> None:
        torch.manual_seed(0)
        self.model = Transformer(SHAPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session: Any = DisabledSession()
        if plan is not None:
            self.session = TracingSession(SessionParts(plan, self.model, self.optimizer, SimulatedRank()))
        self.waits: list[int] = []
        self.background_waits: list[int] = []
        self.kernels: list[list[str]] = []
        self._background: set[int | None] = set()
        """The threads that write: the last step ends with the session, and with its thread."""

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            torch.accelerator.synchronize()
            EMU.clear_logs(True)
            accumulated(self.session, self.model, self.optimizer, SHAPE, 2, max_norm=0.1)
            self._background |= {
                thread.native_id for thread in threading.enumerate() if thread.name == "ttrace-background"
            }
            waits = EMU.waits()
            self.waits.append(sum(thread not in self._background for thread, _ in waits))
            self.background_waits.append(sum(thread in self._background for thread, _ in waits))
            self.kernels.append([name for _, stream, name in EMU.kernels() if stream == 0])
        self.session.close()


def count_chunks() -> Callable[[], int]:
    """Count the chunks that are filled from now on."""
    number = 0
    own = PinnedChunk.seal

    def seal(self: PinnedChunk, arrivals: list[torch.Event]) -> None:
        nonlocal number
        number += 1
        own(self, arrivals)

    PinnedChunk.seal = seal  # type: ignore[method-assign]
    return lambda: number


def is_in_order(kernels: list[str], among: list[str]) -> bool:
    """Whether all kernels of a step are among those of another, in the same order."""
    rest = iter(among)
    return all(kernel in rest for kernel in kernels)


def main() -> int:
    torch.set_num_threads(1)
    torch.set_default_device("emu")
    is_met = True
    num_chunks = count_chunks()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for lag in LAGS:
            EMU.set_lag(lag)
            bare = Steps(None)
            bare.run()
            reference = Plan(out=folder / f"reference-{lag}", num_steps=NUM_STEPS, stop=False)
            plans = {
                "reference": reference,
                "candidate": reference.model_copy(
                    update={"out": folder / "candidate", "role": "candidate", "reference": reference.out}
                ),
                "candidate, sketches": reference.model_copy(
                    update={"out": folder / "s", "role": "candidate", "reference": reference.out, "record": "sketch"}
                ),
                "twin": reference.model_copy(
                    update={"out": folder / "twin", "role": "twin", "twin": 1, "reference": reference.out}
                ),
            }
            for (role, plan), limit in ((item, limit) for item in plans.items() for limit in LIMITS):
                before = num_chunks()
                EMU.reset_peak_pinned_bytes()
                idle = EMU.peak_pinned_bytes()
                traced = Steps(plan.model_copy(update={"max_bytes_held": limit}))
                traced.run()
                waits = max(ours - own for ours, own in zip(traced.waits, bare.waits, strict=True))
                chunks = num_chunks() - before
                per_chunk = sum(traced.background_waits) / chunks
                pinned = (EMU.peak_pinned_bytes() - idle) / limit
                ordered = all(map(is_in_order, bare.kernels, traced.kernels))
                is_met &= waits <= WAITS_PER_STEP and per_chunk <= WAITS_PER_CHUNK and pinned <= 1 and ordered
                print(
                    f"{role}, {limit >> 20} MiB, kernels {lag} ms late: {waits} waits a step (bar {WAITS_PER_STEP}), "
                    f"{per_chunk:.2f} waits of the writer a chunk (bar {WAITS_PER_CHUNK}, {chunks} chunks), "
                    f"pinned memory {pinned:.2f} of the limit (bar 1), "
                    f"kernels {'in their order' if ordered else 'IN ANOTHER ORDER'}, "
                    f"{len(traced.kernels[-1])} of {len(bare.kernels[-1])}"
                )
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
