"""This module overhears the torch functions that no hook sees: backward, clipping, context_parallel, and choices.

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

    def hears_gradients(self) -> None:
        """All gradients are final: their norm is about to be taken."""

    def hears_norm(self, norm: torch.Tensor) -> None:
        """The norm of all gradients was taken; they are not clipped yet."""

    def hears_clip(self, factor: torch.Tensor) -> None:
        """All gradients are about to be multiplied by this."""

    def hears_choice(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Along the last dim of the scores, these indices were chosen; a returned tensor is what is chosen instead."""

    def hears_cut(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        """A sequence of this size was dealt out over a mesh; of each sample (a row) this rank holds these indices."""


_lock = threading.Lock()
_listeners: dict[int, Listener] = {}
_backward = torch.autograd.backward
_total_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_clip: Callable[..., None] = clip_grad._clip_grads_with_norm_
_topk, _argmax = torch.topk, torch.argmax
_CHOOSERS: tuple[Any, ...] = (torch, torch.Tensor)
_shards: Callable[..., list[Any]] = _attention._context_parallel_buffers


@contextmanager
def overheard(listener: Listener) -> Iterator[None]:
    """Tell the listener what this thread does, until the end of the block."""
    thread = threading.get_ident()
    with _lock:
        if not _listeners:
            _replace()
        _listeners[thread] = listener
    try:
        yield
    finally:
        with _lock:
            del _listeners[thread]
            if not _listeners:
                _put_back()


def _replace() -> None:
    torch.autograd.backward = _told_backward  # Tensor.backward looks it up here
    clip_grad._get_total_norm = _told_norm  # and clip_grad_norm_ these, whoever imported it by name
    clip_grad._clip_grads_with_norm_ = _told_clip  # type: ignore[assignment]  # what else it takes is passed on
    _attention._context_parallel_buffers = _told_shards  # type: ignore[assignment]  # and context_parallel this
    for owner in _CHOOSERS:
        owner.topk, owner.argmax = _told_topk, _told_argmax


def _put_back() -> None:
    torch.autograd.backward = _backward
    clip_grad._get_total_norm = _total_norm
    clip_grad._clip_grads_with_norm_ = _clip
    _attention._context_parallel_buffers = _shards
    torch.topk, torch.argmax = _topk, _argmax
    # A tensor inherits its methods; the functions above would be none.
    del torch.Tensor.topk, torch.Tensor.argmax


def _listener() -> Listener | None:
    """This thread's listener; accelerators recompute in threads of the autograd engine, which have none."""
    found = _listeners.get(threading.get_ident())
    return next(iter(_listeners.values())) if found is None and len(_listeners) == 1 else found


def _told_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    listener = _listener()
    if listener is not None:
        listener.hears_backward((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    _backward(tensors, *args, **kwargs)


def _told_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    listener = _listener()
    if listener is not None:
        listener.hears_gradients()
    norm = _total_norm(*args, **kwargs)
    if listener is not None:
        listener.hears_norm(norm)
    return norm


def _told_clip(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor, *args: Any
) -> None:
    listener = _listener()
    if listener is not None:
        listener.hears_clip(torch.clamp(max_norm / (total_norm + 1e-6), max=1.0))
    _clip(parameters, max_norm, total_norm, *args)


def _told_topk(scores: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    own = _topk(scores, k, dim, *args, **kwargs)
    other = _instead(scores, own.indices, dim)
    return own if other is None else torch.return_types.topk((scores.gather(-1, other), other))


def _told_argmax(scores: torch.Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    own = _argmax(scores, dim, *args, **kwargs)
    other = None if dim is None else _instead(scores, own, dim)
    return own if other is None else other


def _instead(scores: torch.Tensor, own: torch.Tensor, dim: int) -> torch.Tensor | None:
    listener = _listener()
    is_last = dim in (-1, scores.ndim - 1)
    return listener.hears_choice(scores, own) if listener is not None and is_last else None


def _told_shards(mesh: DeviceMesh, buffers: list[Any], dims: list[int], load_balancer: Any = None) -> list[Any]:
    """Deal out the numbers of the tokens as well: they say in which order the tokens are dealt."""
    listener = _listener()
    for buffer, dim in zip(buffers, dims, strict=False) if listener is not None else ():
        if isinstance(buffer, torch.Tensor):
            num_samples, size = buffer.shape[0] if dim else 1, buffer.shape[dim]
            index = torch.arange(size, device=buffer.device).expand(num_samples, size)
            listener.hears_cut(mesh, size, _shards(mesh, [index], [1], load_balancer)[0])  # type: ignore[union-attr]
    return _shards(mesh, buffers, dims, load_balancer)
