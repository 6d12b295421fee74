"""Choice of the kernels: C for memory, Triton for accelerators, or torch.

`TTRACE_KERNELS` chooses a variant by name, or `torch`; `use_kernels` does so for a block of code.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from ttrace.errors import TTraceError
from ttrace.values.kernels.library import Kernels, load_kernels

TORCH = "torch"
TRITON_DEVICES = ("cuda", "xpu")
_TRITON_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels in Triton are used for."""
_block_variant: ContextVar[str | None] = ContextVar("_block_variant", default=None)


def choose_kernels() -> Kernels | None:
    """Choose the C kernels for this context; None if torch computes instead."""
    name = _find_requested_variant()
    if name == TORCH:
        return None
    runnable = load_kernels()
    if name is None:
        return next(iter(runnable.values()), None)
    if name not in runnable:
        raise TTraceError(f"there are no kernels {name!r} here; known are {', '.join([*runnable, TORCH])}.")
    return runnable[name]


def name_variant() -> str:
    """Return the name of the variant that computes in this context."""
    library = choose_kernels()
    return TORCH if library is None else library.variant


def choose_device_kernels(tensor: torch.Tensor) -> Any:
    """Choose the module of kernels in Triton for a tensor on an accelerator; None if torch computes instead."""
    if tensor.device.type not in TRITON_DEVICES or tensor.dtype not in _TRITON_DTYPES:
        return None
    return None if _find_requested_variant() == TORCH else _load_triton(tensor.device)


def list_variants() -> tuple[str, ...]:
    """List the variants of the C kernels that this processor can run, best first; none without the library."""
    return tuple(load_kernels())


@contextmanager
def use_kernels(variant: str) -> Iterator[None]:
    """Compute with this variant, or with `torch`, in this block."""
    token = _block_variant.set(variant)
    try:
        choose_kernels()
        yield
    finally:
        _block_variant.reset(token)


@functools.cache  # it is called for every tensor that is recorded
def read_requested_variant() -> str | None:
    """Read which variant the environment asks for, once per process."""
    return os.environ.get("TTRACE_KERNELS") or None


def _find_requested_variant() -> str | None:
    return _block_variant.get() or read_requested_variant()


@functools.cache
def _load_triton(device: torch.device) -> ModuleType | None:
    try:
        from ttrace.values.kernels import triton_kernels

        return triton_kernels if triton_kernels.works_on(device) else None
    except Exception:  # Triton or a compiler that it needs is not installed: it raises errors of many kinds
        return None
