"""This module spreads the work of a check: the same function over all ids, wherever it runs.

Work is given out in lots: ids that follow each other, so that what a worker reads lies together in a few chunks. The
context, with its traces, is what a worker is sent once: traces travel as the names of their folders. Other engines than
threads are in `workflow/engines`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ttrace.tensors.ids import TensorId

Context = TypeVar("Context", bound="Identified")
Result = TypeVar("Result")
Task = TypeVar("Task")
Work = Callable[[Context, Sequence[TensorId]], list[Result]]
Weigh = Callable[[TensorId], int]
"""How many bytes an id makes a worker read."""

OnProgress = Callable[[int, int], None]
"""Told how many of how many bytes are read."""

_LOT_BYTES, _LOT_IDS = 32 << 20, 256
AHEAD = 4
"""Lots per worker that are given out before their results are taken."""


@dataclass(frozen=True)
class Lot:
    """Ids that one worker takes at a time, and how many bytes they make it read."""

    ids: Sequence[TensorId]
    num_bytes: int


class Identified(Protocol):
    """What work is done on."""

    @property
    def identity(self) -> str:
        """Differs as soon as the results may."""


class Engine(Protocol):
    """Somewhere to work."""

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        """What `work` makes of every id, in their order."""


class Threads:
    """Threads of this process: kernels and the disk do not wait for Python."""

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        if self.num_workers == 1:
            for lot in lots:
                yield from work(context, lot.ids)
            return
        pool = ThreadPoolExecutor(self.num_workers)
        try:
            # The copied context brings along which kernels the caller chose.
            tasks = (pool.submit(copy_context().run, work, context, lot.ids) for lot in lots)
            yield from take_in_order(tasks, lambda task: task.result(), AHEAD * self.num_workers)
        finally:
            pool.shutdown(cancel_futures=True)


HERE = Threads()
"""One id after the other."""


def count_cores() -> int:
    """How many cores this process may use, up to eight: more wait for memory."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


def use_all_cores() -> Threads:
    return Threads(count_cores())


def take_in_order(tasks: Iterable[Task], result: Callable[[Task], list[Result]], num_ahead: int) -> Iterator[Result]:
    """The results of tasks, in their order; at most `num_ahead` are begun and not yet taken."""
    waiting: deque[Task] = deque()
    for task in tasks:
        waiting.append(task)
        if len(waiting) >= num_ahead:
            yield from result(waiting.popleft())
    while waiting:
        yield from result(waiting.popleft())


def make_lots(ids: Iterable[TensorId], weigh: Weigh) -> Iterator[Lot]:
    """Ids in their order, so many at a time that a worker is busy for a while, but not for long."""
    taken: list[TensorId] = []
    num_bytes = 0
    for tensor_id in ids:
        taken.append(tensor_id)
        num_bytes += weigh(tensor_id)
        if num_bytes >= _LOT_BYTES or len(taken) == _LOT_IDS:
            yield Lot(taken, num_bytes)
            taken, num_bytes = [], 0
    if taken:
        yield Lot(taken, num_bytes)
