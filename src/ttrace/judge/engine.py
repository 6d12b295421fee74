"""This module spreads the work of a check: the same function over all ids, wherever it runs.

Work is given out in lots, each a list of ids of the same context. The context, with its traces, is what a worker
is sent once: traces travel as the names of their folders.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol, TypeVar

from ttrace.tensors.ids import TensorId

Context = TypeVar("Context")
Result = TypeVar("Result")
Work = Callable[[Context, Sequence[TensorId]], list[Result]]
Weigh = Callable[[TensorId], int]
"""How many bytes an id makes a worker read."""

Progress = Callable[[int, int], None]
"""Told how many of how many bytes are read."""

_LOT_BYTES, _LOT_IDS = 32 << 20, 256
_AHEAD = 4
"""Lots per worker that are given out before their results are taken."""


class Engine(Protocol):
    """Somewhere to work."""

    def map(
        self, work: Work[Context, Result], context: Context, lots: Iterable[Sequence[TensorId]]
    ) -> Iterator[Result]:
        """What `work` makes of every id, in their order."""


class Threads:
    """Threads of this process: kernels and the disk do not wait for Python."""

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers

    def map(
        self, work: Work[Context, Result], context: Context, lots: Iterable[Sequence[TensorId]]
    ) -> Iterator[Result]:
        if self.num_workers == 1:
            for lot in lots:
                yield from work(context, lot)
            return
        waiting: deque[Future[list[Result]]] = deque()
        with ThreadPoolExecutor(self.num_workers) as pool:
            try:
                for lot in lots:
                    # The copied context brings along which kernels the caller chose.
                    waiting.append(pool.submit(copy_context().run, work, context, lot))
                    if len(waiting) >= _AHEAD * self.num_workers:
                        yield from waiting.popleft().result()
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


HERE = Threads()
"""One id after the other."""


def all_cores() -> Threads:
    """As many threads as this process may use cores, up to eight: more wait for memory."""
    return Threads(min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8))


def lots(ids: Iterable[TensorId], weigh: Weigh) -> Iterator[list[TensorId]]:
    """Ids in their order, so many at a time that a worker is busy for a while, but not for long."""
    lot: list[TensorId] = []
    num_bytes = 0
    for tensor_id in ids:
        lot.append(tensor_id)
        num_bytes += weigh(tensor_id)
        if num_bytes >= _LOT_BYTES or len(lot) == _LOT_IDS:
            yield lot
            lot, num_bytes = [], 0
    if lot:
        yield lot
