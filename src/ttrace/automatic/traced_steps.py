"""The steps of a script that automatic attachment traces: their data passes through a session.

`watch.py` describes the states that a script goes through.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ttrace.attach import PLAN_VARIABLE
from ttrace.automatic.data_sources import Line
from ttrace.automatic.first_step import FirstStep, describe_model
from ttrace.automatic.frameworks import join_models
from ttrace.capture.observe.hooks import has_tensors
from ttrace.capture.parts import Declarations
from ttrace.capture.session import TracingSession
from ttrace.capture.start import ConsecutiveSessions, start_session
from ttrace.compat.distributed import read_num_chunks
from ttrace.errors import CaptureError
from ttrace.trace.format import Attachment

_TARGET = "target"
"""The slot of labels."""
_OF_SCHEDULE = (_TARGET, "losses", "return_outputs")
"""Arguments of a schedule's step that are not passed on to the model."""
_UNIT = 1 << 24
"""Random numbers between 0 and 1 are generated as multiples of 1 / _UNIT, so that they stay between 0 and 1."""


def attach_to(model: Any, optimizer: Any, declared: Declarations | None = None) -> TracingSession | ConsecutiveSessions:
    """Start a session for the model that a framework is going to train, with the framework's own data."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    attachment = Attachment(
        model=", ".join(map(describe_model, chunks)),
        optimizers=(type(optimizer).__name__,),
        data="the framework's own",
        keeps_data=True,
        num_microbatches=0,
        labels=True,
    )
    return start_session(model, optimizer, declared or Declarations(), attachment, address=os.environ[PLAN_VARIABLE])


class TracedSteps:
    """The steps of a script from the second on. A step ends with the first event that belongs to the next."""

    def __init__(self, first: FirstStep, declared: Declarations | None = None) -> None:
        first.restore()
        self._first = first
        self._keeps_data = first.plan.data == "own"
        self._optimizers = first.outer_optimizers
        optimizer = self._optimizers[0] if len(self._optimizers) == 1 else self._optimizers
        self._session = start_session(
            first.models if first.is_pipeline else join_models(first.models),
            optimizer,
            declared or Declarations(),
            first.describe(),
            address=os.environ[PLAN_VARIABLE],
        )
        self._block = contextlib.ExitStack()
        self._waiting: set[Optimizer] = set()
        """The optimizers that have not stepped yet in the current step."""
        self._num_batches = self._num_calls = self._num_targets = 0
        self._draws: dict[Line, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._waiting = set(self._optimizers)
        self._num_batches = self._num_calls = self._num_targets = 0
        self._draws.clear()
        self._block.enter_context(self._session.step())

    def finish(self) -> None:
        """End the current step; after the plan's last step, the session ends the script."""
        self._block.close()

    def close(self) -> str:
        """End the current step. If it is not complete, leave it out of the trace and return a sentence about it."""
        if not self._waiting or self._session.is_closed:
            self.finish()
            return ""
        problem = CaptureError("the script ended within a traced step, before every optimizer had stepped.")
        with contextlib.suppress(CaptureError):
            self._block.__exit__(CaptureError, problem, None)
        return str(problem)

    def _begin_next_if_due(self) -> None:
        if not self._waiting:
            self.finish()
            self._begin()

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._waiting.discard(optimizer)

    def on_batch(self, loader: Any, batch: Any) -> Any:
        """Replace a batch of a training loader."""
        if not self._first.is_training_loader(loader) or not has_tensors(batch):
            return batch
        self._begin_next_if_due()
        self._num_batches += 1
        if self._keeps_data:
            self._session.keep(batch, self._num_batches - 1)
            return batch
        return self._session.batch(batch)

    def on_draw(self, line: Line, drawn: torch.Tensor, *, is_unit: bool) -> torch.Tensor:
        """Replace random numbers that the script draws for a microbatch."""
        per_microbatch = self._first.count_draws(line)
        if not per_microbatch or self._keeps_data:
            return drawn
        self._begin_next_if_due()
        count = self._draws[line] = self._draws.get(line, -1) + 1
        microbatch, position = divmod(count, per_microbatch)
        slot = f"random.{list(self._draws).index(line)}.{position}"
        if not is_unit:
            return self._generate(slot, drawn, microbatch, exact=True)
        integers = (drawn.double() * _UNIT).long()
        return (self._generate(slot, integers, microbatch, exact=True).double() / _UNIT).to(drawn.dtype)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the arguments of a training call of the model, unless they come from a batch."""
        if module not in self._first.models:
            return args, kwargs
        if not self._waiting and not module.training:
            self.finish()  # an evaluation is not part of a step
        if not (module.training and torch.is_grad_enabled()):
            return args, kwargs
        self._begin_next_if_due()
        if module is self._first.models[0]:
            if self._num_calls % self._first.calls_per_microbatch == 0:
                self._session.begin_microbatch()
            self._num_calls, self._num_targets = self._num_calls + 1, 0
        if self._num_batches or module is not self._first.models[0]:
            return args, kwargs
        return self._replace_arguments(args, kwargs, [self._num_calls - 1])

    def on_schedule(self, schedule: Any, args: Any, kwargs: Any) -> Any:
        """Replace the inputs of a pipeline, under the names of the arguments of the whole model."""
        self._begin_next_if_due()
        if self._num_batches:
            return args, kwargs
        passed = {name: value for name, value in kwargs.items() if name not in _OF_SCHEDULE}
        args, passed = self._replace_arguments(args, passed, range(read_num_chunks(schedule)))
        return args, {**kwargs, **passed}

    def on_target(self, target: torch.Tensor) -> torch.Tensor:
        """Replace labels of a loss outside of the model. Labels that follow from replaced data are compared instead."""
        if self._first.is_pipeline:  # a pipeline computes one loss for each microbatch
            self._num_calls, self._num_targets = self._num_calls + 1, 0
        if self._num_batches or not self._num_calls:
            return target
        number = self._num_calls - 1
        slot = f"{_TARGET}.{self._num_targets}" if self._num_targets else _TARGET
        self._num_targets += 1
        # A script that ignores some labels has counted the others, so the labels must not change.
        has_ignored = not target.is_floating_point() and bool((target < 0).any())
        if self._keeps_data:
            self._session.keep({slot: target}, number)
            return target
        if self._draws or has_ignored:
            self._session.compare(slot, target, number)
            return target
        return self._generate(slot, target, number)

    def _replace_arguments(self, args: Any, kwargs: Any, numbers: Sequence[int]) -> Any:
        """Replace the arguments of a call for these microbatches, which divide the first dim of each tensor."""
        named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        parts = [_take_part(named, i, len(numbers)) for i in range(len(numbers))]
        for part, number in zip(parts, numbers, strict=True):
            if self._keeps_data:
                self._session.keep(part, number)
                continue
            # Scalars, such as a number of tokens, keep their values.
            counts = {name: part.pop(name) for name, value in list(part.items()) if _is_scalar(value)}
            part.update(self._session.generate(part, number), **counts)
            for name, count in counts.items():
                self._session.compare(name, count, number)
        joined = parts[0] if len(parts) == 1 else {name: _join([part[name] for part in parts]) for name in named}
        return tuple(joined[str(i)] for i in range(len(args))), {name: joined[name] for name in kwargs}

    def _generate(self, slot: str, data: torch.Tensor, number: int, *, exact: bool = False) -> torch.Tensor:
        generated: torch.Tensor = self._session.generate({slot: data}, number, exact=exact)[slot]
        return generated


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _take_part(named: dict[str, Any], number: int, num_parts: int) -> dict[str, Any]:
    if num_parts == 1:
        return dict(named)
    return {
        name: torch.tensor_split(value, num_parts)[number] if _is_split(value) else value
        for name, value in named.items()
    }


def _join(parts: list[Any]) -> Any:
    return torch.cat(parts) if _is_split(parts[0]) else parts[0]


def _is_split(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0
