"""This module listens to torch.distributed.pipelining: which microbatch a stage is at, and what its loss is.

Stages are wrapped at their class, so a script says nothing: forward and backward of each chunk pass through
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk`, whatever the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase

from ttrace.adapters.adapter import Listener

_listeners: WeakKeyDictionary[nn.Module, Listener] = WeakKeyDictionary()


def listen(stage_module: nn.Module, listener: Listener) -> None:
    """Tell the listener of every chunk of the stage that runs this module."""
    _wrap_stages()
    _listeners[stage_module] = listener


def _listener_of(stage: _PipelineStageBase) -> Listener | None:
    modules = [stage.submod, *stage.submod.modules()]
    return next((found for module in modules if (found := _listeners.get(module)) is not None), None)


@functools.cache
def _wrap_stages() -> None:
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(_PipelineStageBase, name, _told(getattr(_PipelineStageBase, name)))
    for kind in (PipelineStage, _PipelineStage):
        kind._prepare_forward_infra = _announced(kind._prepare_forward_infra)  # type: ignore[method-assign]
    _PipelineStageBase.scale_grads = _divided(_PipelineStageBase.scale_grads)  # type: ignore[method-assign]


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def one_chunk(stage: _PipelineStageBase, chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        listener = _listener_of(stage)
        if listener is None:
            return method(stage, chunk_id, *args, **kwargs)
        with listener.in_chunk(chunk_id, is_first=stage.is_first, is_last=stage.is_last):
            loss = kwargs.get("loss")
            if isinstance(loss, torch.Tensor):
                listener.sees_loss(loss)
            return method(stage, chunk_id, *args, **kwargs)

    return one_chunk


def _announced(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def prepare(stage: _PipelineStageBase, *args: Any, **kwargs: Any) -> Any:
        listener = _listener_of(stage)
        if listener is not None:
            listener.is_pipelined()
        return method(stage, *args, **kwargs)

    return prepare


def _divided(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scale_grads(stage: _PipelineStageBase, grad_scale_factor: int) -> Any:
        listener = _listener_of(stage)
        if listener is not None:
            listener.will_divide(grad_scale_factor)
        return method(stage, grad_scale_factor)

    return scale_grads
