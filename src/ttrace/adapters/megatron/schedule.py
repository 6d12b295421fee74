"""Patches of Megatron's schedules, which report the microbatch and the chunk that run, and the loss.

All schedules call `forward_step` and `backward_step` of Megatron's own module. Each chunk runs its microbatches in
order.

`read_owned_range` uses a private API of Megatron-core. It names the versions in which it was seen, and what happens
without it.
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

from ttrace.adapters.adapter import FrameworkEvents
from ttrace.patches import Patches, SharedPatches

_MODEL, _NUM_MICROBATCHES = 2, 3
"""The positions of these arguments in `forward_step`."""


@dataclass
class _ScheduledChunk:
    """The state of a chunk in the schedule."""

    events: FrameworkEvents
    is_first: bool
    is_last: bool
    num_forwards: int = 0

    def next_microbatch(self, num_microbatches: int) -> int:
        number = self.num_forwards
        self.num_forwards = (number + 1) % num_microbatches
        return number


_stages: WeakKeyDictionary[nn.Module, _ScheduledChunk] = WeakKeyDictionary()
_producers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each output of a forward, the stage and the microbatch that produced it."""


def watch_chunk(chunk: nn.Module, events: FrameworkEvents, patches: Patches, *, is_first: bool, is_last: bool) -> None:
    """Report what the schedule does with this chunk, until the patches are removed."""
    _shared.acquire()
    patches.on_remove(_shared.release)
    _stages[chunk] = _ScheduledChunk(events, is_first, is_last)
    patches.on_remove(functools.partial(_stages.pop, chunk, None))


def read_owned_range(distributed_optimizer: Any, parameter: nn.Parameter) -> tuple[int, int]:
    """Read the run of a parameter's flattened values that this rank's distributed optimizer owns.

    `DistributedOptimizer._get_model_param_range_map`, in all versions that the tests run (zoo/harness/megatron).
    Without it gradients and states of the distributed optimizer cannot be recorded.
    """
    owned = distributed_optimizer._get_model_param_range_map(parameter)["param"]
    return owned.start, owned.end


def _install(patches: Patches) -> None:
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    patches.wrap(schedules, "forward_step", _wrap_forward)
    patches.wrap(schedules, "backward_step", _wrap_backward)


_shared = SharedPatches(_install)


def _wrap_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward_step)
    def forward(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"] if "model" in kwargs else args[_MODEL]
        stage = _stages.get(model)
        if stage is None:
            return forward_step(*args, **kwargs)
        total = kwargs["num_microbatches"] if "num_microbatches" in kwargs else args[_NUM_MICROBATCHES]
        microbatch = stage.next_microbatch(total)
        stage.events.on_pipeline()
        with stage.events.on_chunk(microbatch, is_first=stage.is_first, is_last=stage.is_last):
            result = forward_step(*args, **kwargs)
            # Since 0.7 the number of tokens follows the outputs of a forward step.
            for output in _list_tensors(result[0] if isinstance(result, tuple) else result):
                _producers[output] = (stage, microbatch)
                if stage.is_last and output.numel() == 1 and output.requires_grad:
                    stage.events.on_loss(output)
        return result

    return forward


def _wrap_backward(backward_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward_step)
    def backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        producer = next(
            (producer for output in _list_tensors(output_tensor) if (producer := _producers.get(output))), None
        )
        if producer is None:
            return backward_step(input_tensor, output_tensor, *args, **kwargs)
        stage, microbatch = producer
        with stage.events.on_chunk(microbatch, is_first=stage.is_first, is_last=stage.is_last):
            return backward_step(input_tensor, output_tensor, *args, **kwargs)

    return backward


def _list_tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
