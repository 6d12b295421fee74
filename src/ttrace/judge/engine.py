"""Engines that distribute the work of a check: the same function over all ids, on threads or the ranks of a job.

Workers take lots of consecutive ids, so that a worker reads a few neighbouring chunks. The engine of a torchrun job is
in `workflow/engines`.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ttrace.layouts.ids import TensorId

Context = TypeVar("Context", bound="Identified")
Result = TypeVar("Result")
Work = Callable[[Context, Sequence[TensorId]], list[Result]]
Weigh = Callable[[TensorId], int]
"""Returns how many bytes a worker reads for an id."""

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes that have been read, and the number of all bytes."""

_LOT_BYTES, _LOT_IDS = 32 << 20, 256
"""A lot ends at this many bytes, or this many ids. Chosen, not measured."""
_NUM_OBJECTS = 1 << 20
"""How many new objects a check makes between two garbage collections."""
_WORTH_A_THREAD = 1 << 10
"""With fewer bytes per id, on average, threads are slower: they wait for the interpreter."""
_AHEAD = 4
"""The number of lots that each worker may start before their results are taken."""


@dataclass(frozen=True)
class Lot:
    """Ids that one worker takes at a time, and how many bytes it reads for them."""

    ids: Sequence[TensorId]
    num_bytes: int


class Identified(Protocol):
    """The context of the work."""

    @property
    def identity(self) -> str:
        """A text that differs whenever the results may differ."""


class Engine(Protocol):
    """A place where work runs."""

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        """Return the results of `work` for all ids, in the order of the ids."""


class Threads:
    """Threads of this process: kernels and disk reads release the interpreter lock."""

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        if self.num_workers == 1:
            for lot in lots:
                yield from work(context, lot.ids)
            return
        pool = ThreadPoolExecutor(self.num_workers)

        def start(lot: Lot) -> Future[list[Result]]:
            if lot.num_bytes < _WORTH_A_THREAD * len(lot.ids):
                return _finish(work(context, lot.ids))
            # The copied context holds the caller's choice of kernels.
            return pool.submit(copy_context().run, work, context, lot.ids)

        try:
            waiting: deque[Future[list[Result]]] = deque()
            for lot in lots:
                waiting.append(start(lot))
                if len(waiting) >= _AHEAD * self.num_workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _finish(result: Result) -> Future[Result]:
    """Return a finished task."""
    task = Future[Result]()
    task.set_result(result)
    return task


HERE = Threads()
"""One id after the other, in this thread."""


def count_cores() -> int:
    """Count the cores that this process may use, up to eight: more would only wait for memory."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


def use_all_cores() -> Threads:
    return Threads(count_cores())


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Collect cyclic garbage rarely in this block.

    A check makes millions of small objects. All of them live until its end and none is part of a reference cycle, so
    collecting again and again would take a tenth of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _NUM_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def make_lots(ids: Iterable[TensorId], weigh: Weigh) -> Iterator[Lot]:
    """Group ids, in order, into lots that keep a worker busy for a short while."""
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
