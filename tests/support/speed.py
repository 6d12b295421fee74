"""Limits on CPU time that grow with how slow the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

USUAL = 0.045
"""CPU seconds of the sample of work on the machine that the limits were chosen on."""


def measure_slowness() -> float:
    """Return how many times longer this machine takes for a sample of work than the usual one; at least 1.

    It is measured each time, because the speed of a busy machine changes from one minute to the next.
    """
    return max(1.0, _time_sample() / USUAL)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Fail when the block takes more CPU time, children included, than `seconds` of the usual machine.

    Time spent waiting for a CPU does not count.
    """
    start = _cpu_seconds()
    yield
    taken, limit = _cpu_seconds() - start, seconds * measure_slowness()
    assert taken < limit, f"{taken:.1f} s of CPU time, more than {limit:.1f}"


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _time_sample() -> float:
    """Measure the CPU seconds of a little Python and a little torch."""
    start = time.thread_time()
    number, matrix = 0, torch.ones(256, 256)
    for i in range(300_000):
        number += i * i % 7
    for _ in range(20):
        matrix = (matrix @ matrix).tanh()
    return time.thread_time() - start
