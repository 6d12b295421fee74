"""Patches of torch.distributed.pipelining, which report a stage's current microbatch and its loss.

The class of stages is patched, so a script declares nothing: forward and backward of each chunk pass through
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk`, whatever the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ttrace.adapters.adapter import FrameworkEvents
from ttrace.compat.distributed import PREPARE_STAGE, list_stage_classes
from ttrace.patches import Patches, SharedPatches

_events: WeakKeyDictionary[nn.Module, FrameworkEvents] = WeakKeyDictionary()
"""For each module of a stage, the receiver of its events."""


def watch_stage(stage_module: nn.Module, events: FrameworkEvents, patches: Patches) -> None:
    """Report every chunk of the stage that runs this module, until the patches are removed."""
    _shared.acquire()
    patches.on_remove(_shared.release)
    _events[stage_module] = events
    patches.on_remove(functools.partial(_events.pop, stage_module, None))


def _find_events(stage: Any) -> FrameworkEvents | None:
    modules = [stage.submod, *stage.submod.modules()]
    return next((events for module in modules if (events := _events.get(module)) is not None), None)


def _install(patches: Patches) -> None:
    base, classes = list_stage_classes()
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        patches.wrap(base, name, _wrap_chunk)
    for kind in classes:
        patches.wrap(kind, PREPARE_STAGE, _wrap_prepare)
    if hasattr(base, "scale_grads"):  # since 2.7; before, schedules do not divide
        patches.wrap(base, "scale_grads", _wrap_scale_grads)


_shared = SharedPatches(_install)


def _wrap_chunk(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def one_chunk(stage: Any, chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        events = _find_events(stage)
        if events is None:
            return method(stage, chunk_id, *args, **kwargs)
        with events.on_chunk(chunk_id, is_first=stage.is_first, is_last=stage.is_last):
            loss = kwargs.get("loss")
            if isinstance(loss, torch.Tensor):
                events.on_loss(loss)
            return method(stage, chunk_id, *args, **kwargs)

    return one_chunk


def _wrap_prepare(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def prepare(stage: Any, *args: Any, **kwargs: Any) -> Any:
        events = _find_events(stage)
        if events is not None:
            events.on_pipeline()
        return method(stage, *args, **kwargs)

    return prepare


def _wrap_scale_grads(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scale_grads(stage: Any, grad_scale_factor: int) -> Any:
        events = _find_events(stage)
        if events is not None:
            events.on_divide(grad_scale_factor)
        return method(stage, grad_scale_factor)

    return scale_grads
