"""Several plans in one process: starting a training script takes longer than running one step.

TTrace cannot know beforehand whether the script allows this: the script may end its loop, or keep some state that is
not restored. So one of the plans is an echo: the reference again, without a nudge. The launcher compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.capture.state.snapshot import Snapshot


class ConsecutiveSessions:
    """Sessions for several plans, one after the other; each starts from the state in which the first one started."""

    def __init__(self, plan: Plan, start: Callable[[Plan], TracingSession], snapshot: Snapshot) -> None:
        *first, last = (plan, *plan.then)
        self._plans = [*(each.model_copy(update={"stop": False}) for each in first), last]
        self._start = start
        self._snapshot = snapshot
        self._session = start(self._plans.pop(0))

    @contextmanager
    def step(self) -> Iterator[None]:
        if self._session.is_closed and self._plans:
            self._start_next()  # not earlier: between two steps a script sets its learning rate
        with self._session.step():
            yield

    @property
    def is_closed(self) -> bool:
        """Whether the trace of the session that runs is complete; the next one begins with a step."""
        return self._session.is_closed

    def batch(self, batch: Any) -> Any:
        return self._session.batch(batch)

    def begin_microbatch(self) -> None:
        self._session.begin_microbatch()

    def generate(self, data: dict[str, Any], number: int, *, exact: bool = False) -> dict[str, Any]:
        return self._session.generate(data, number, exact=exact)

    def compare(self, slot: str, data: torch.Tensor, number: int) -> None:
        self._session.compare(slot, data, number)

    def keep(self, batch: Any, number: int) -> None:
        self._session.keep(batch, number)

    def close(self) -> None:
        self._plans.clear()
        self._session.close()

    def _start_next(self) -> None:
        _wait_for_ranks()
        self._snapshot.restore()
        self._session = self._start(self._plans.pop(0))


def _wait_for_ranks() -> None:
    """Wait until all ranks have written what the next plan reads."""
    if dist.is_available() and dist.is_initialized():
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, None)
