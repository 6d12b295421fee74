"""Data that enters a pipeline through the step of a schedule of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from ttrace.automatic.imports import OnImport
from ttrace.patches import Patches

OnSchedule = Callable[[Any, Any, Any], AbstractContextManager[Any]]
"""A function that gets a schedule and the arguments of its step. The block that it returns gives those to use instead,
and is around the step."""


def watch_schedules(on_schedule: OnSchedule, patches: Patches) -> dict[str, OnImport]:
    """Call `on_schedule` before every step of a schedule, until the patches are removed.

    Return what must be done when torch's pipelining has been imported, in the form that `watch_imports` takes.
    """

    def on_import(module: ModuleType) -> None:
        for kind in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
            patches.wrap(kind, "step", functools.partial(_wrap_step, on_schedule=on_schedule))

    return {"torch.distributed.pipelining.schedules": on_import}


def _wrap_step(method: Callable[..., Any], *, on_schedule: OnSchedule) -> Callable[..., Any]:
    @functools.wraps(method)
    def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with on_schedule(schedule, args, kwargs) as (args, kwargs):
            return method(schedule, *args, **kwargs)

    return step
