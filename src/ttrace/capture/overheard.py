"""This module overhears the torch functions that no hook sees: where backward starts, and how gradients are clipped.

The functions are replaced while a step runs and put back after it. Ranks may be threads of one process, so each thread
has a listener of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
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


_lock = threading.Lock()
_listeners: dict[int, Listener] = {}
_backward = torch.autograd.backward
_total_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_clip: Callable[..., None] = clip_grad._clip_grads_with_norm_


@contextmanager
def overheard(listener: Listener) -> Iterator[None]:
    """Tell the listener what this thread does, until the end of the block."""
    thread = threading.get_ident()
    with _lock:
        _listeners[thread] = listener
        _replace(_told_backward, _told_norm, _told_clip)
    try:
        yield
    finally:
        with _lock:
            del _listeners[thread]
            if not _listeners:
                _replace(_backward, _total_norm, _clip)


def _replace(backward: Any, total_norm: Any, clip: Any) -> None:
    torch.autograd.backward = backward  # Tensor.backward looks it up here
    clip_grad._get_total_norm = total_norm  # and clip_grad_norm_ these, whoever imported it by name
    clip_grad._clip_grads_with_norm_ = clip


def _told_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.hears_backward((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    _backward(tensors, *args, **kwargs)


def _told_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.hears_gradients()
    norm = _total_norm(*args, **kwargs)
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
