"""Watch over a process until it trains, and automatic attachment to its training step.

The script's first step runs unchanged, and shows which modules are called, which optimizers step, and where data comes
from. When the second step begins, the state from before the first step is restored and a session is attached. So
nothing has to be guessed, frameworks have finished what they initialise lazily, and a script that attaches by itself
before its first step finds nothing changed.

A watched script goes through these states. `Watch` patches torch and passes every event on to the object that is
responsible for the current state: `FirstStep` observes only, `TracedSteps` replaces data.

    WATCHING, no call yet ........ Watch and FirstStep, no snapshot
      |  a module is called in training mode: FirstStep saves the state (on_call)
    FIRST STEP ................... FirstStep counts calls, batches, draws and losses
      |  every optimizer of the called modules has stepped (FirstStep.is_over)
    FIRST STEP IS OVER ........... waiting for an event that belongs to the second step: a batch, a draw, a call or a
      |                            schedule (Watch._begin_step_if_due). TracedSteps restores the state and attaches
    TRACED STEP .................. TracedSteps passes data through the session; `_waiting` has the optimizers to step
      |  all of them have stepped
    BETWEEN STEPS ................ TracedSteps waits for an event that belongs to the next step, which ends this one
      |  `_begin_next_if_due` ends the step, and the session ends the script after the plan's last step
    TRACED STEP, and so on

Three events leave this sequence in any state. `withdraw`: the script attaches by itself, so all patches are removed (an
error once a step is traced). `_on_model`: a framework hands out its model, so a session is attached at once, and its
first step is traced. `close`: the process ends, so the traced step ends, or a problem is reported if nothing was
traced.

A session's modules are imported only when there is something to trace, because launchers import torch as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ttrace.automatic.data_sources import Line, is_loading, watch_draws, watch_loaders, watch_losses, watch_schedules
from ttrace.automatic.first_step import FirstStep
from ttrace.automatic.frameworks import watch_frameworks
from ttrace.automatic.imports import watch_imports
from ttrace.compat.torch import is_in_backward
from ttrace.errors import CaptureError
from ttrace.patches import Patches

if TYPE_CHECKING:
    from ttrace.automatic.traced_steps import TracedSteps
    from ttrace.capture.parts import Declarations


class Watch:
    """The patches of a process, and the state that its script is in (see the module's docstring)."""

    def __init__(self, on_problem: Callable[[str], object]) -> None:
        """Set up the watch; `on_problem` gets a sentence if the process trains but cannot be traced."""
        self.declared: Declarations | None = None
        """What the script declared about its parallelism, to a callback."""
        self._on_problem = on_problem
        self._patches = Patches()
        self._inside = threading.local()
        self._num_stepping = 0
        self._first = FirstStep()
        self._traced: TracedSteps | None = None
        self._is_finished = False
        """Whether this object no longer watches: it was closed, or someone else attached."""
        self._is_in_schedule = self._has_batches = False

    def start(self) -> None:
        """Patch torch."""
        self._patches.wrap(nn.Module, "__call__", self._wrap_call)
        self._patches.wrap(Optimizer, "__init__", self._wrap_init)
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: self._on_step_begin(optimizer))
        after = register_optimizer_step_post_hook(lambda optimizer, *_: self._on_step_end(optimizer))
        self._patches.on_remove(before.remove)
        self._patches.on_remove(after.remove)
        on_imports = {
            **watch_loaders(self._on_batch, self._patches),
            **watch_schedules(self._on_schedule, self._patches),
            **watch_frameworks(self.close, self._on_model, self._patches),
        }
        watch_imports(on_imports, self._patches)
        watch_losses(self._on_target, self._first.on_classes, self._patches)
        watch_draws(self._on_draw, self._patches)

    def withdraw(self) -> None:
        """Remove all patches, because the script attaches by itself."""
        if self._traced is not None:
            raise CaptureError(
                "the script calls ttrace.attach after its first training step, when TTrace has already attached. "
                "Call it earlier, or run with --attach script."
            )
        self._is_finished = True
        self._patches.remove()

    # Events of the script

    def _on_model(self, model: Any, optimizer: Any) -> Callable[[], AbstractContextManager[None]]:
        """Attach to the model that a framework is going to train. Its first step is traced, so nothing is watched."""
        from ttrace.automatic.traced_steps import attach_to

        self._is_finished = True
        self._patches.remove()
        return attach_to(model, optimizer, self.declared).step

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(optimizer, *args, **kwargs)
            self._first.on_optimizer(optimizer)

        return __init__

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling() or self._is_inside or is_in_backward():
                return original(module, *args, **kwargs)
            if not self._is_in_schedule:
                args, kwargs = self._on_call(module, args, kwargs)
            self._inside.value = True
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._inside.value = False
            if self._traced is None:
                self._first.on_result(module, result)
            return result

        return __call__

    @property
    def _is_inside(self) -> bool:
        """Whether this thread is inside a module's call."""
        return getattr(self._inside, "value", False)

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Handle a call of a module by the script or its framework, not by another module."""
        if module.training and torch.is_grad_enabled():
            self._begin_step_if_due()
            if self._traced is None:
                self._first.on_call(module)
        return (args, kwargs) if self._traced is None else self._traced.on_call(module, args, kwargs)

    def _on_batch(self, loader: Any, batch: Any) -> Any:
        if self._first.is_training_loader(loader):
            self._begin_step_if_due()
        if self._traced is not None:
            return self._traced.on_batch(loader, batch)
        if not self._has_batches:
            from ttrace.capture.observe.loaders import watch_last_loader  # a launcher needs none of this

            self._has_batches = True
            watch_last_loader(self._patches)
        self._first.on_batch(loader)
        return batch

    def _on_draw(self, line: Line, drawn: torch.Tensor, is_unit: bool) -> torch.Tensor:
        if self._is_inside or is_loading() or is_in_backward() or not torch.is_grad_enabled():
            return drawn
        if self._first.is_data_line(line):
            self._begin_step_if_due()
        if self._traced is not None:
            return self._traced.on_draw(line, drawn, is_unit=is_unit)
        self._first.on_draw(line)
        return drawn

    def _on_target(self, target: torch.Tensor) -> torch.Tensor:
        if self._is_inside:
            return target
        if self._traced is not None:
            return self._traced.on_target(target)
        self._first.on_target()
        return target

    @contextmanager
    def _on_schedule(self, schedule: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        self._begin_step_if_due()
        if self._traced is None:
            self._first.on_schedule(schedule)
        else:
            args, kwargs = self._traced.on_schedule(schedule, args, kwargs)
        self._is_in_schedule = True
        try:
            yield args, kwargs
        finally:
            self._is_in_schedule = False

    def _on_step_begin(self, optimizer: Optimizer) -> None:
        self._num_stepping += 1
        if self._traced is None:
            self._first.on_step_begin(optimizer)

    def _on_step_end(self, optimizer: Optimizer) -> None:
        self._num_stepping -= 1
        if self._traced is None:
            self._first.on_step_end(optimizer, is_inner=self._num_stepping > 0)
        else:
            self._traced.on_step_end(optimizer)

    def _begin_step_if_due(self) -> None:
        """Attach if the first step is over, because the current event belongs to the second step."""
        if self._traced is None and self._first.is_over():
            from ttrace.automatic.traced_steps import TracedSteps

            self._traced = TracedSteps(self._first, self.declared)

    def close(self) -> None:
        """End the current step, or report why nothing was traced, and remove all patches."""
        if self._is_finished:
            return
        self._is_finished = True
        try:
            problem = self._first.describe_problem() if self._traced is None else _end_steps(self._traced)
            if problem:
                self._on_problem(problem)
        finally:
            self._patches.remove()


def _end_steps(traced: TracedSteps) -> str:
    """End the current step; return a sentence if it was not completed."""
    try:
        return traced.close()
    except SystemExit:  # the session ends the script after the last step, but the script is already ending
        return ""
