"""Engine of worker processes on this machine, for checks that Python slows down more than the disk."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ttrace.errors import TTraceError
from ttrace.judge.engine import AHEAD, Context, Lot, Result, Work, take_in_order
from ttrace.layouts.ids import TensorId
from ttrace.values.kernels.choice import TORCH, choose_kernels, use_kernels

_work: Work[Any, Any]
_context: Any
_variant: str
"""In a worker process: its work, set when it starts."""


class Processes:
    """A pool for each part of a check; its context goes to every worker once, when that starts."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        # A server imports torch once and has no threads, so that forking workers from it is quick and safe.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__, "ttrace.judge.check"])
        pool = ProcessPoolExecutor(self.num_workers, server, _start_worker, (work, context, kernel_variant()))
        try:
            tasks = (pool.submit(_do_work, lot.ids) for lot in lots)
            yield from take_in_order(tasks, lambda task: task.result(), AHEAD * self.num_workers)
        except BrokenProcessPool:
            raise TTraceError(
                "a worker process of the check died, perhaps for lack of memory. Use fewer with --workers, or "
                "--engine threads."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def kernel_variant() -> str:
    """Return the variant of the kernels that this process uses: workers use the same."""
    library = choose_kernels()
    return TORCH if library is None else library.variant


def _start_worker(work: Work[Any, Any], context: object, chosen: str) -> None:
    global _work, _context, _variant
    _work, _context, _variant = work, context, chosen


def _do_work(ids: Sequence[TensorId]) -> list[Any]:
    with use_kernels(_variant):
        return _work(_context, ids)
