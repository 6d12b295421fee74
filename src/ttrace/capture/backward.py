"""This module hears of every backward pass while it listens: the tensor it starts from is the loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Listener = Callable[[tuple[torch.Tensor, ...]], None]

_lock = threading.Lock()
_listeners: dict[int, Listener] = {}
"""By thread: ranks may be threads of one process."""
_original = torch.autograd.backward


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Tell the listener of each `torch.autograd.backward`, which `Tensor.backward` calls too, in this thread."""
    thread = threading.get_ident()
    with _lock:
        _listeners[thread] = listener
        torch.autograd.backward = _backward
    try:
        yield
    finally:
        with _lock:
            del _listeners[thread]
            if not _listeners:
                torch.autograd.backward = _original


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    _original(tensors, *args, **kwargs)
