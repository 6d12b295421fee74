"""Timing of several ways of doing one thing: in turns, in random order, by medians.

Time is CPU time of all threads, which other programs on the machine disturb less than the clock on the wall.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

Run = Callable[[int], object]
"""Does it once; the number of the round may choose the data, so that none is found in a cache."""


def ratios(runs: Mapping[str, Run], base: str, num_rounds: int) -> dict[str, float]:
    """By name, how many times faster than `base` each is: the median over all rounds, after one to warm up."""
    chance = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in runs}
    turn = 0
    for number in range(num_rounds + 1):
        times = {}
        for name in chance.sample(list(runs), len(runs)):
            times[name] = _seconds(runs[name], turn)
            turn += 1
        if number:
            for name, seconds in times.items():
                found[name].append(times[base] / seconds)
    return {name: statistics.median(each) for name, each in found.items()}


def _seconds(run: Run, turn: int) -> float:
    start = time.process_time_ns()
    run(turn)
    return max(time.process_time_ns() - start, 1) / 1e9
