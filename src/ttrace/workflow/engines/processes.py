"""This module works in processes of this machine, for checks that wait for Python more than for the disk."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ttrace.errors import TTraceError
from ttrace.judge.engine import AHEAD, Context, Lot, Result, Work, in_order
from ttrace.tensors.ids import TensorId
from ttrace.values.kernels.library import TORCH, kernels, using

_work: Work[Any, Any]
_context: Any
_variant: str
"""Of a worker process: what it is there for."""


class Processes:
    """A pool for each part of a check; its context goes to every worker once, when that starts."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        # A server imports torch once and has no threads: workers are forked from it in a moment, and safely.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__, "ttrace.judge.check"])
        pool = ProcessPoolExecutor(self.num_workers, server, _begin, (work, context, variant()))
        try:
            tasks = (pool.submit(_done, lot.ids) for lot in lots)
            yield from in_order(tasks, lambda task: task.result(), AHEAD * self.num_workers)
        except BrokenProcessPool:
            raise TTraceError(
                "a worker process of the check died, perhaps for lack of memory. Use fewer with --workers, or "
                "--engine threads."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def variant() -> str:
    """The kernels that the caller uses: workers use the same."""
    found = kernels()
    return TORCH if found is None else found.variant


def _begin(work: Work[Any, Any], context: object, chosen: str) -> None:
    global _work, _context, _variant
    _work, _context, _variant = work, context, chosen


def _done(ids: Sequence[TensorId]) -> list[Any]:
    with using(_variant):
        return _work(_context, ids)
