"""Patches of the torch functions that no hook sees: backward, clipping, context_parallel, choices, and collectives.

The functions are replaced while a step runs and put back after it. Ranks may be threads of one process, so each thread
has a session of its own, and the patches are shared.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import is_tensor_like

from ttrace.capture.observe.events import SessionEvents
from ttrace.capture.observe.hooks import is_recompute
from ttrace.compat import distributed as distributed_compat
from ttrace.compat import torch as torch_compat
from ttrace.errors import CaptureError
from ttrace.patches import OutermostCall, Patches, SharedPatches

_sessions: dict[int, SessionEvents] = {}
"""The session of each thread, by the thread's id."""
_script = OutermostCall()
_BUFFERS = distributed_compat.find_context_parallel_buffers()
"""Looked up here and not in the step: an import may fail where too many files are open, and a step must not fail."""


@contextmanager
def patch_torch(events: SessionEvents) -> Iterator[None]:
    """Report this thread's calls of the patched functions to `events`, until the end of the block."""
    thread = threading.get_ident()
    _patches.acquire()
    _sessions[thread] = events
    try:
        yield
    finally:
        del _sessions[thread]
        _patches.release()


def _install(patches: Patches) -> None:
    patches.wrap(torch.autograd, "backward", _wrap_backward)  # Tensor.backward looks it up here
    # clip_grad_norm_ looks this one up. A script that calls get_total_norm uses another name, and is not observed: it
    # may take the norm of the gradients of some layers, or of one stage. The norm that it clips by is observed.
    patches.wrap(*torch_compat.find_total_norm(), _wrap_total_norm)
    patches.wrap_cell(torch_compat.find_clip_cell(), _wrap_clip)
    patches.wrap(*_BUFFERS, _wrap_buffers)
    for name in ("capture_begin", "replay"):
        patches.wrap(torch.cuda.CUDAGraph, name, _refuse_graph)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        patches.on_remove(distributed_compat.observe_collectives(_observe))
        patches.wrap(torch.distributed.Work, "wait", _wrap_wait)
    for owner in (torch, torch.Tensor):
        patches.wrap(owner, "topk", _wrap_topk)
        patches.wrap(owner, "argmax", _wrap_argmax)


_patches = SharedPatches(_install)


def _find_session() -> SessionEvents | None:
    """Return this thread's session; None if it has none.

    Accelerators recompute in threads of the autograd engine, which have no session of their own: they get the only one
    there is. What any other thread does is not part of the model, whichever module runs meanwhile.
    """
    session = _sessions.get(threading.get_ident())
    if session is None and len(_sessions) == 1 and is_recompute():
        return next(iter(_sessions.values()))
    return session


def _observe(name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
    session = _find_session()
    return run() if session is None else session.on_collective(name, arguments, run)


def _wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        session = _find_session()
        if session is not None:
            session.on_wait(work)
        return original(work, *args, **kwargs)

    return wait


def _refuse_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError(
            "a CUDA graph runs in the traced step. It replays kernels and calls no module, so nothing in it can be "
            "recorded. Switch CUDA graphs off for this run: in torch.compile without mode='reduce-overhead' or with "
            "TORCHINDUCTOR_CUDAGRAPHS=0, in Megatron with --cuda-graph-impl none."
        )

    return refuse


def _wrap_backward(original: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        is_single = is_tensor_like(tensors) or isinstance(tensors, GradientEdge)  # which is a tuple itself
        roots = tensors if is_single else tuple(tensors)  # an iterator can be read only once
        session = _find_session()
        if session is not None:
            session.on_backward((roots,) if is_single else roots)
        original(roots, *args, **kwargs)

    return backward


def _wrap_total_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = _list_tensors(tensors)
        session = _find_session()
        if session is not None:
            session.on_final_gradients(tensors)
        return original(tensors, *args, **kwargs)

    return get_total_norm


def _wrap_clip(original: Callable[..., None]) -> Callable[..., None]:
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = _list_tensors(parameters)
        session = _find_session()
        if session is not None:
            session.on_final_gradients(parameters)
            session.on_grad_norm(total_norm)
            session.on_clip(torch.clamp(max_norm / (total_norm + 1e-6), max=1.0))
        original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def _list_tensors(tensors: Any) -> list[Any]:
    """List one tensor or several; an iterator can be read only once."""
    return [tensors] if is_tensor_like(tensors) else list(tensors)


_INPUT, _DIM = ("input", "x", "a", "x1"), ("dim", "axis")
"""The names under which torch accepts an argument: its own, and NumPy's."""


def _wrap_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    def topk(*args: Any, **kwargs: Any) -> Any:
        if _script.is_running:
            return original(*args, **kwargs)
        own = _script.run(original, *args, **kwargs)
        scores = _find_argument(args, kwargs, 0, _INPUT)
        other = _choose(scores, own.indices, _find_argument(args, kwargs, 2, _DIM, -1))
        return own if other is None else torch.return_types.topk((scores.gather(-1, other), other))

    return topk


def _wrap_argmax(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def argmax(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _script.is_running:
            return original(*args, **kwargs)
        own: torch.Tensor = _script.run(original, *args, **kwargs)
        dim = _find_argument(args, kwargs, 1, _DIM)
        other = None if dim is None else _choose(_find_argument(args, kwargs, 0, _INPUT), own, dim)
        return own if other is None else other

    return argmax


def _find_argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int, names: Sequence[str], default: Any = None
) -> Any:
    """Find an argument that was passed by position, or by one of these names."""
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _choose(scores: torch.Tensor, own: torch.Tensor, dim: int) -> torch.Tensor | None:
    session = _find_session()
    is_last = dim in (-1, scores.ndim - 1)
    return session.on_topk(scores, own) if session is not None and is_last else None


def _wrap_buffers(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def split_buffers(mesh: DeviceMesh, buffers: list[Any], dims: list[int], *args: Any, **kwargs: Any) -> list[Any]:
        """Split the indices of the tokens as well: they show how the tokens are split."""
        session = _find_session()
        for buffer, dim in zip(buffers, dims, strict=False) if session is not None else ():
            if isinstance(buffer, torch.Tensor):
                num_samples, size = buffer.shape[0] if dim else 1, buffer.shape[dim]
                index = torch.arange(size, device=buffer.device).expand(num_samples, size)
                session.on_sequence_split(mesh, size, original(mesh, [index], [1], *args, **kwargs)[0])  # type: ignore[union-attr]
        return original(mesh, buffers, dims, *args, **kwargs)

    return split_buffers
