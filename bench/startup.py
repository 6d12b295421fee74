"""Startup time of `ttrace --help`, and the CPU time of the README's clean quick start beside its two bare launches.

`--help` is timed on the clock, as a user feels it. For the quick start, the CPU time (user and system) of `ttrace run`
with all that it starts is divided by that of two launches of the same script without `ttrace`: one as the reference
runs, one under torchrun as the candidate does. A bare script imports torch once per process, and so does `ttrace`
itself for the check: with three processes and the launcher of torchrun in the two bare launches, that import alone
makes the ratio about 1.2. Before the commands were imported lazily, `--help` took 2.9 s of CPU time.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_RATIO = 0.4, 1.6
NUM_HELPS, NUM_ROUNDS = 9, 3
HELPS = (("--help",), ("check", "--help"), ("--version",))
SCRIPT = str(ROOT / "examples" / "hidden_allreduce.py")
REFERENCE = (sys.executable, SCRIPT)
CANDIDATE = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT)


def main() -> int:
    chance = random.Random(0)
    helps = measure_help(chance)
    for words, seconds in helps.items():
        print(f"ttrace {words}: {seconds:.2f} s (at most {MOST_SECONDS} s)")
    found = [measure_round(chance) for _ in range(NUM_ROUNDS)]
    ratios = sorted(quick_start / bare for quick_start, bare in found)
    quick_start, bare = (statistics.median(values) for values in zip(*found, strict=True))
    ratio = statistics.median(ratios)
    print(f"quick start {quick_start:.1f} s of CPU time, two bare launches {bare:.1f} s")
    print(
        f"{ratio:.2f} times the CPU time of two bare launches ({ratios[0]:.2f} to {ratios[-1]:.2f}, bar {MOST_RATIO})"
    )
    return int(max(helps.values()) > MOST_SECONDS or ratio > MOST_RATIO)


def measure_help(chance: random.Random) -> dict[str, float]:
    """Return the median seconds of each command that only prints, in random order."""
    times: dict[str, list[float]] = {" ".join(words): [] for words in HELPS}
    order = [words for words in HELPS for _ in range(NUM_HELPS)]
    chance.shuffle(order)
    _run((sys.executable, "-m", "ttrace", "--help"))  # the first one reads files from the disk
    for words in order:
        start = time.perf_counter()
        _run((sys.executable, "-m", "ttrace", *words))
        times[" ".join(words)].append(time.perf_counter() - start)
    return {words: statistics.median(each) for words, each in times.items()}


def measure_round(chance: random.Random) -> tuple[float, float]:
    """Return the CPU seconds of the quick start and of the two bare launches, in random order."""
    with tempfile.TemporaryDirectory() as folder:
        quick_start: tuple[str, ...] = (sys.executable, "-m", "ttrace", "run", "--out", f"{folder}/run")
        quick_start += ("--reference", " ".join(REFERENCE), "--candidate", " ".join(CANDIDATE))
        commands = [quick_start, REFERENCE, CANDIDATE]
        chance.shuffle(commands)
        seconds = {command: _cpu_seconds(command) for command in commands}
    return seconds[quick_start], seconds[REFERENCE] + seconds[CANDIDATE]


def _cpu_seconds(command: tuple[str, ...]) -> float:
    before = os.times()
    _run(command)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _run(command: tuple[str, ...]) -> None:
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
