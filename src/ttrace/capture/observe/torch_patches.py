"""This module overhears the torch functions that no hook sees: backward, clipping, context_parallel, and choices.

The functions are replaced while a step runs and put back after it. Ranks may be threads of one process, so each thread
has a listener of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.utils import clip_grad

from ttrace.capture.observe.hooks import is_recompute


class Listener(Protocol):
    """Who is told."""

    def hears_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A backward pass is about to start from these tensors."""

    def hears_gradients(self) -> None:
        """All gradients are final: their norm is about to be taken."""

    def hears_norm(self, norm: torch.Tensor) -> None:
        """By this norm of all gradients they are about to be clipped."""

    def hears_clip(self, factor: torch.Tensor) -> None:
        """All gradients are about to be multiplied by this."""

    def hears_choice(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Along the last dim of the scores, these indices were chosen; a returned tensor is what is chosen instead."""

    def hears_cut(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        """A sequence of this size was dealt out over a mesh; of each sample (a row) this rank holds these indices."""


def _find_decorated(function: Any) -> CellType:
    """The cell in which torch's decorator keeps what it decorates: a change there counts under every name.

    `torch.nn.utils.clip_grads_with_norm_` is another name of a function that `clip_grad_norm_` calls, and scripts
    import it by name.
    """
    cell: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    return cell


_lock = threading.Lock()
_listeners: dict[int, Listener] = {}
_backward = torch.autograd.backward
_total_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_clip_cell = _find_decorated(clip_grad._clip_grads_with_norm_)
_clip: Callable[..., None] = _clip_cell.cell_contents
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
    # And clip_grad_norm_ this one. Scripts that call get_total_norm have it under another name, and are not heard: what
    # they take the norm of may be the gradients of some layers, or of one stage. What they clip by is heard.
    clip_grad._get_total_norm = _told_norm
    _clip_cell.cell_contents = _told_clip
    _attention._context_parallel_buffers = _told_shards  # type: ignore[assignment]  # and context_parallel this
    for owner in _CHOOSERS:
        owner.topk, owner.argmax = _told_topk, _told_argmax


def _put_back() -> None:
    torch.autograd.backward = _backward
    clip_grad._get_total_norm = _total_norm
    _clip_cell.cell_contents = _clip
    _attention._context_parallel_buffers = _shards
    torch.topk, torch.argmax = _topk, _argmax
    # A tensor inherits its methods; the functions above would be none.
    del torch.Tensor.topk, torch.Tensor.argmax


def _listener() -> Listener | None:
    """This thread's listener; accelerators recompute in threads of the autograd engine, which have none.

    Any other thread does something of its own, whatever module runs meanwhile.
    """
    found = _listeners.get(threading.get_ident())
    if found is None and len(_listeners) == 1 and is_recompute():
        return next(iter(_listeners.values()))
    return found


def _told_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    listener = _listener()
    if listener is not None:
        listener.hears_backward((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    _backward(tensors, *args, **kwargs)


def _told_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    listener = _listener()
    if listener is not None:
        listener.hears_gradients()
    return _total_norm(*args, **kwargs)


def _told_clip(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    listener = _listener()
    if listener is not None:
        listener.hears_gradients()
        listener.hears_norm(total_norm)
        listener.hears_clip(torch.clamp(max_norm / (total_norm + 1e-6), max=1.0))
    _clip(parameters, max_norm, total_norm, *args, **kwargs)


_INPUT, _DIM = ("input", "x", "a", "x1"), ("dim", "axis")
"""The names by which torch takes an argument: its own, and NumPy's."""


def _told_topk(*args: Any, **kwargs: Any) -> Any:
    own = _topk(*args, **kwargs)
    scores = _argument(args, kwargs, 0, _INPUT)
    other = _instead(scores, own.indices, _argument(args, kwargs, 2, _DIM, -1))
    return own if other is None else torch.return_types.topk((scores.gather(-1, other), other))


def _told_argmax(*args: Any, **kwargs: Any) -> torch.Tensor:
    own = _argmax(*args, **kwargs)
    dim = _argument(args, kwargs, 1, _DIM)
    other = None if dim is None else _instead(_argument(args, kwargs, 0, _INPUT), own, dim)
    return own if other is None else other


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int, names: Sequence[str], default: Any = None
) -> Any:
    """What a function was given: by position, or by one of these names."""
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


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
