"""Engine on a Ray cluster: the one that this process belongs to, or one of its own on this machine.

A task is a few neighbouring lots, so that one worker reads neighbouring bytes. A worker that dies is replaced
by Ray, which runs its tasks again. All workers must see the traces under the same paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import ray

from ttrace.errors import TTraceError
from ttrace.judge.engine import AHEAD, Context, Lot, Result, Work, take_in_order
from ttrace.layouts.ids import TensorId
from ttrace.values.kernels.choice import use_kernels
from ttrace.workflow.engines.processes import kernel_variant

_TASK_BYTES, _TASK_LOTS = 128 << 20, 4
_NUM_RETRIES = 5

_contexts: dict[str, Any] = {}
"""In a worker process: the context of the last task, so that its traces are opened once."""


class RayTasks:
    """Tasks of Ray; `num_workers` is how many run at a time, 0 for as many as the cluster has CPUs."""

    def __init__(self, num_workers: int = 0) -> None:
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(num_workers)
        self.num_workers = num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """End a cluster that was started here; another one keeps running."""
        if self._is_ours:
            ray.shutdown()

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        # In a list it arrives as a reference, and each worker fetches it once.
        reference = [ray.put(context)]
        run = ray.remote(_do_work).options(max_retries=_NUM_RETRIES)
        chosen = kernel_variant()
        tasks = (run.remote(work, reference, ids, chosen) for ids in _make_batches(lots))
        try:
            yield from take_in_order(tasks, ray.get, AHEAD * self.num_workers)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TTraceError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise TTraceError(f"Ray could not finish the check: {str(error).splitlines()[0]}") from None


def _connect(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one here."""
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except ConnectionError:
        ray.init(num_cpus=num_workers or None, include_dashboard=False, log_to_driver=False, logging_level="error")


def _make_batches(lots: Iterable[Lot]) -> Iterator[list[TensorId]]:
    rest = iter(lots)
    while batch := list(islice(rest, 1)):
        while sum(lot.num_bytes for lot in batch) < _TASK_BYTES and len(batch) < _TASK_LOTS:
            if (following := next(rest, None)) is None:
                break
            batch.append(following)
        yield [tensor_id for lot in batch for tensor_id in lot.ids]


def _do_work(work: Work[Any, Any], reference: list[Any], ids: Sequence[TensorId], chosen: str) -> list[Any]:
    key = reference[0].hex()
    if key not in _contexts:
        _contexts.clear()
        _contexts[key] = ray.get(reference[0])
    with use_kernels(chosen):
        return work(_contexts[key], ids)
