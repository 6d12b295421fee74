"""This module overhears the torch functions that no hook sees: backward, the clipping of gradients, context_parallel.

The functions are replaced while a step runs and put back after it. Ranks may be threads of one process, so each thread
has a listener of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.utils import clip_grad


class Listener(Protocol):
    """Who is told."""

    def hears_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A backward pass is about to start from these tensors."""

    def hears_norm(self, norm: torch.Tensor) -> None:
        """The norm of all gradients was taken; they are not clipped yet."""

    def hears_clip(self, factor: torch.Tensor) -> None:
        """All gradients are about to be multiplied by this."""

    def hears_cut(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        """A sequence of this size was dealt out over a mesh; of each sample (a row) this rank holds these indices."""


_lock = threading.Lock()
_listeners: dict[int, Listener] = {}
_backward = torch.autograd.backward
_total_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_clip: Callable[..., None] = clip_grad._clip_grads_with_norm_
_shards: Callable[..., list[Any]] = _attention._context_parallel_buffers


@contextmanager
def overheard(listener: Listener) -> Iterator[None]:
    """Tell the listener what this thread does, until the end of the block."""
    thread = threading.get_ident()
    with _lock:
        _listeners[thread] = listener
        _replace(_told_backward, _told_norm, _told_clip, _told_shards)
    try:
        yield
    finally:
        with _lock:
            del _listeners[thread]
            if not _listeners:
                _replace(_backward, _total_norm, _clip, _shards)


def _replace(backward: Any, total_norm: Any, clip: Any, shards: Any) -> None:
    torch.autograd.backward = backward  # Tensor.backward looks it up here
    clip_grad._get_total_norm = total_norm  # and clip_grad_norm_ these, whoever imported it by name
    clip_grad._clip_grads_with_norm_ = clip
    _attention._context_parallel_buffers = shards  # and context_parallel this


def _told_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.hears_backward((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    _backward(tensors, *args, **kwargs)


def _told_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    norm = _total_norm(*args, **kwargs)
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.hears_norm(norm)
    return norm


def _told_clip(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor, *args: Any
) -> None:
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.hears_clip(torch.clamp(max_norm / (total_norm + 1e-6), max=1.0))
    _clip(parameters, max_norm, total_norm, *args)


def _told_shards(mesh: DeviceMesh, buffers: list[Any], dims: list[int], load_balancer: Any = None) -> list[Any]:
    """Deal out the numbers of the tokens as well: they say in which order the tokens are dealt."""
    listener = _listeners.get(threading.get_ident())
    for buffer, dim in zip(buffers, dims, strict=False) if listener is not None else ():
        if isinstance(buffer, torch.Tensor):
            num_samples, size = buffer.shape[0] if dim else 1, buffer.shape[dim]
            index = torch.arange(size, device=buffer.device).expand(num_samples, size)
            listener.hears_cut(mesh, size, _shards(mesh, [index], [1], load_balancer)[0])  # type: ignore[union-attr]
    return _shards(mesh, buffers, dims, load_balancer)
