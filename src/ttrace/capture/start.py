"""Start of a session: from the plan, and from what the script and the command line declare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, list_optimizers
from ttrace.adapters.registry import make_adapter
from ttrace.adapters.wrappers import unwrap_module, unwrap_optimizer
from ttrace.capture.parts import Declarations, SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.process import wait_for_gloo_at_exit
from ttrace.capture.session import TracingSession
from ttrace.capture.state.snapshot import Snapshot
from ttrace.trace.format import Attachment


def choose_adapter(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer] | None, declared: Declarations
) -> tuple[list[nn.Module], Optimizer | None, Adapter]:
    """Choose the adapter for what a script passes; return the chunks, the optimizer to observe, and the adapter."""
    chunks = [
        unwrap_module(each) for each in (model if isinstance(model, (list, tuple)) else [cast("nn.Module", model)])
    ]
    optimizers = [unwrap_optimizer(each) for each in list_optimizers(optimizer)]
    given = optimizers[0] if len(optimizers) == 1 else optimizers or None
    adapter = make_adapter(declared.adapter, chunks, given, declared.mesh)
    return chunks, adapter.find_optimizer(given), adapter


def start_session(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    declared: Declarations,
    attachment: Attachment | None = None,
    *,
    address: str,
) -> TracingSession | ConsecutiveSessions:
    """Start to trace as the plan at this address says; `attachment` is what automatic attachment found."""
    plan = Plan.find(address)
    wait_for_gloo_at_exit()
    declared = declared.or_planned(plan)
    chunks, optimizer, adapter = choose_adapter(model, optimizer, declared)
    parts = SessionParts(plan, chunks, optimizer, adapter, declared, attachment)
    if not plan.then:
        return TracingSession(parts)
    saved = Snapshot(chunks, adapter.find_torch_optimizers(optimizer), with_parameters=plan.parameters == "own")
    return ConsecutiveSessions(parts, saved)


class ConsecutiveSessions:
    """Sessions for several plans in one process, because starting a script takes longer than running one step.

    Each session starts from the state in which the first one started. TTrace cannot know beforehand whether the script
    allows this: the script may end its loop, or keep some state that is not restored. So one of the plans is an echo:
    the reference again, without a nudge. The launcher compares the two.
    """

    def __init__(self, parts: SessionParts, snapshot: Snapshot) -> None:
        *first, last = (parts.plan, *parts.plan.then)
        self._plans = [*(each.model_copy(update={"stop": False}) for each in first), last]
        self._parts = parts
        self._snapshot = snapshot
        self._session = self._start_next()

    def __getattr__(self, name: str) -> Any:
        """Everything else is done by the session that runs; the next one begins with a step."""
        return getattr(self._session, name)

    @contextmanager
    def step(self) -> Iterator[None]:
        if self._session.is_closed and self._plans:
            _wait_for_ranks()  # not earlier: between two steps a script sets its learning rate
            self._snapshot.restore()
            self._session = self._start_next()
        with self._session.step():
            yield

    def batch(self, batch: Any) -> Any:
        return self._session.batch(batch)

    def close(self) -> None:
        self._plans.clear()
        self._session.close()

    def _start_next(self) -> TracingSession:
        return TracingSession(replace(self._parts, plan=self._plans.pop(0)))


def _wait_for_ranks() -> None:
    """Wait until all ranks have written what the next plan reads."""
    if dist.is_available() and dist.is_initialized():
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, None)
