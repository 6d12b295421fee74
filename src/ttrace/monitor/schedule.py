"""Full traces in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.monitor.trace_schedule import TraceSchedule


class ScheduledTraces:
    """The traces of a schedule. The script goes on after each."""

    def __init__(self, schedule: TraceSchedule, out: Path, start: Callable[[Plan], TracingSession]) -> None:
        self._schedule = schedule
        self._out = out
        self._start = start
        self._session: TracingSession | None = None
        self._step = -1
        self._open = ExitStack()

    def on_step_end(self, step: int) -> None:
        """After a step of the optimizer, start the trace that begins with the next one: no module runs now."""
        if self._session is None and self._schedule.is_start(step + 1):
            plan = Plan(
                out=self._out / f"step-{step + 1}", parameters="own", num_steps=self._schedule.active, stop=False
            )
            self._session = self._start(plan)

    def on_call(self, step: int) -> None:
        """At the first call of a step, end the step before it, and begin this one if it is traced."""
        if step == self._step:
            return
        self._step = step
        self._open.close()
        if self._session is not None and self._session.is_closed:
            self._session = None
        if self._session is not None:
            self._open.enter_context(self._session.step())

    def close(self, _: int) -> None:
        """End everything: a trace whose steps are not complete is closed as it is."""
        self._open.close()
        if self._session is not None and not self._session.is_closed:
            self._session.close()
