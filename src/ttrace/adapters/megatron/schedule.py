"""This module listens to Megatron's schedules: which microbatch of which chunk runs, and what its loss is.

All schedules go through the module's own `forward_step` and `backward_step`. Within a chunk microbatches come in order.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ttrace.adapters.adapter import Listener

_MODEL, _NUM_MICROBATCHES = 2, 3
"""The positions of these arguments of `forward_step`."""


@dataclass
class _Stage:
    """A chunk as the schedule knows it."""

    listener: Listener
    is_first: bool
    is_last: bool
    num_forwards: int = 0

    def next_microbatch(self, num_microbatches: int) -> int:
        number = self.num_forwards
        self.num_forwards = (number + 1) % num_microbatches
        return number


_stages: WeakKeyDictionary[nn.Module, _Stage] = WeakKeyDictionary()
_made_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By output of a forward, the stage and the microbatch that made it."""


def listen(chunk: nn.Module, listener: Listener, *, is_first: bool, is_last: bool) -> None:
    """Tell the listener what the schedule does with this chunk."""
    _wrap_schedules()
    _stages[chunk] = _Stage(listener, is_first, is_last)


@functools.cache
def _wrap_schedules() -> None:
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    schedules.forward_step = _told_forward(schedules.forward_step)
    schedules.backward_step = _told_backward(schedules.backward_step)


def _told_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward_step)
    def told(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"] if "model" in kwargs else args[_MODEL]
        stage = _stages.get(model)
        if stage is None:
            return forward_step(*args, **kwargs)
        total = kwargs["num_microbatches"] if "num_microbatches" in kwargs else args[_NUM_MICROBATCHES]
        microbatch = stage.next_microbatch(total)
        stage.listener.is_pipelined()
        with stage.listener.in_chunk(microbatch, is_first=stage.is_first, is_last=stage.is_last):
            result = forward_step(*args, **kwargs)
            for output in _outputs(result):
                _made_by[output] = (stage, microbatch)
                if stage.is_last and output.numel() == 1 and output.requires_grad:
                    stage.listener.sees_loss(output)
        return result

    return told


def _told_backward(backward_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward_step)
    def told(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        made = next((made for output in _tensors(output_tensor) if (made := _made_by.get(output))), None)
        if made is None:
            return backward_step(input_tensor, output_tensor, *args, **kwargs)
        stage, microbatch = made
        with stage.listener.in_chunk(microbatch, is_first=stage.is_first, is_last=stage.is_last):
            return backward_step(input_tensor, output_tensor, *args, **kwargs)

    return told


def _outputs(result: Any) -> list[torch.Tensor]:
    """The output of a forward step: since 0.7 the number of tokens follows it."""
    return _tensors(result[0] if isinstance(result, tuple) else result)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
