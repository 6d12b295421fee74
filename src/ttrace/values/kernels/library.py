"""Loader of the C kernels, which chooses the best variant for this processor, and of those for accelerators.

The library uses neither Python's nor torch's ABI. It may be absent: the package then computes with torch.
`TTRACE_KERNELS` chooses a variant by name, or `torch`; `use_kernels` does so for a block of code.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ttrace.errors import TTraceError

TORCH = "torch"
VARIANTS = ("avx512", "avx2", "sse2", "neon")
"""The variants, best first."""
DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    )
}
"""The dtypes that kernels can read, each with its number in lanes.h."""

TRITON_DEVICES = ("cuda", "xpu")
_TRITON_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What the kernels in Triton are used for."""

_CHECKSUM = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32)
_BOX = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_SIGNATURES = {
    "crc": (_CHECKSUM, ctypes.c_uint32),
    "copy": ((*_CHECKSUM, ctypes.c_void_p), ctypes.c_uint32),
    "stats": ((*(ctypes.c_void_p, ctypes.c_int64) * 3, ctypes.c_void_p), None),
    "sketch": ((*_BOX, ctypes.c_int64, ctypes.c_void_p), None),
    "generate": ((*_BOX, ctypes.c_int64, ctypes.c_float, ctypes.c_float), None),
}
"""Signatures of functions that are called so often that they take plain numbers; others wrap each argument."""
_FILE = Path(__file__).parent / "kernels.so"
_requested: ContextVar[str | None] = ContextVar("_requested", default=None)


@dataclass(frozen=True)
class Kernels:
    """One variant's functions; calls release the GIL."""

    variant: str
    functions: ctypes.CDLL

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.functions, f"ttrace_{name}_{self.variant}")
        if name in _SIGNATURES:
            function.argtypes, function.restype = _SIGNATURES[name]
        object.__setattr__(self, name, function)
        typed: Callable[..., int] = function
        return typed


def choose_kernels() -> Kernels | None:
    """Choose the kernels for this context; None if torch computes instead."""
    name = _find_requested()
    if name == TORCH:
        return None
    runnable = _load_runnable()
    if name is None:
        return next(iter(runnable.values()), None)
    if name not in runnable:
        raise TTraceError(f"there are no kernels {name!r} here; known are {', '.join([*runnable, TORCH])}.")
    return runnable[name]


def choose_device_kernels(tensor: torch.Tensor) -> Any:
    """Choose the module of kernels in Triton for a tensor on an accelerator; None if torch computes instead."""
    if tensor.device.type not in TRITON_DEVICES or tensor.dtype not in _TRITON_DTYPES:
        return None
    return None if _find_requested() == TORCH else _load_triton(tensor.device)


def _find_requested() -> str | None:
    return _requested.get() or read_environment()


@functools.cache  # every record asks
def read_environment() -> str | None:
    """Read which variant the environment asks for, once per process."""
    return os.environ.get("TTRACE_KERNELS") or None


def list_variants() -> tuple[str, ...]:
    """List the variants that this processor can run, best first; none without the library."""
    return tuple(_load_runnable())


@contextmanager
def use_kernels(variant: str) -> Iterator[None]:
    """Compute with this variant, or with `torch`, in this block."""
    token = _requested.set(variant)
    try:
        choose_kernels()
        yield
    finally:
        _requested.reset(token)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether kernels can read this tensor in place."""
    return tensor.dtype in DTYPES and tensor.is_cpu and tensor.layout is torch.strided


@functools.cache
def _load_runnable() -> dict[str, Kernels]:
    if not _FILE.exists():
        return {}
    library = ctypes.CDLL(str(_FILE))
    return {name: Kernels(name, library) for name in VARIANTS if getattr(library, f"ttrace_can_run_{name}")()}


@functools.cache
def _load_triton(device: torch.device) -> ModuleType | None:
    try:
        kernels = importlib.import_module("ttrace.values.kernels.triton_kernels")
        return kernels if kernels.works_on(device) else None
    except Exception:  # it is not installed, or there is no compiler that it needs: it raises errors of many kinds
        return None
