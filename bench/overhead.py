"""This module measures what recording costs: the CPU time of a traced step against a bare one, and the memory held.

The step is that of a 12-layer GPT in float32, recorded in full or as sketches: inputs, outputs and both gradients of
every module, the parameters and their gradients. CPU time is that of all threads, user and system. It ends when the
trace is closed, so that every byte has been handed to the kernel and synced; waiting for the disk is no CPU time. Bare
and traced steps alternate in random order, and each round gives one ratio.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bench._checksums import without_checksums
from bench._memory import measured
from bench._training import Training

RATIOS = {"full": 1.25, "sketch": 1.12}
HELD = 1.1
"""The bars: CPU time of a traced step over a bare one's; memory held over the plan's limit."""
NUM_ROUNDS = 11


@dataclass(frozen=True)
class Cost:
    """What one step took: CPU seconds, and the most memory the process had beyond what it had before, in bytes."""

    seconds: float
    peak: int


def cost(step: Callable[[], None]) -> Cost:
    with measured() as peak:
        start = time.process_time()
        step()
        seconds = time.process_time() - start
    return Cost(seconds, peak.beyond)


def rounds(ways: Mapping[str, Callable[[], Cost]], chance: random.Random) -> list[dict[str, Cost]]:
    """Costs of bare and traced steps, each round in random order."""
    found = []
    for _ in range(NUM_ROUNDS):
        order = list(ways)
        chance.shuffle(order)
        found.append({name: ways[name]() for name in order})
    return found


def _unchecked(training: Training) -> Cost:
    with without_checksums():
        return cost(training.traced("full"))


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder) / "trace")
        ways: dict[str, Callable[[], Cost]] = {
            "bare": lambda: cost(training.step),
            "full": lambda: cost(training.traced("full")),
            "sketch": lambda: cost(training.traced("sketch")),
            "full without checksums": lambda: _unchecked(training),
        }
        sizes = {}
        for name, warm_up in ways.items():
            warm_up()
            sizes[name] = sum(path.stat().st_size for path in training.plan.out.rglob("*") if path.is_file())
        found = rounds(ways, random.Random(0))
    is_met = True
    for name in (*RATIOS, "full without checksums"):
        bar = RATIOS.get(name, math.inf)
        each = sorted(costs[name].seconds / costs["bare"].seconds for costs in found)
        held = statistics.median(costs[name].peak - costs["bare"].peak for costs in found)
        ratio, share = statistics.median(each), held / training.plan.max_bytes_held
        print(
            f"{name}: {ratio:.2f} times the CPU time of a bare step ({each[0]:.2f} to {each[-1]:.2f}), "
            f"{held / 2**20:.0f} MiB held ({share:.2f} of the limit), trace of {sizes[name] / 2**20:.0f} MiB "
            f"(bars {bar}, {HELD} of the limit)"
        )
        is_met = is_met and ratio <= bar and share <= HELD
    return int(not is_met)
