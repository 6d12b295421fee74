"""Loader of the C kernels, one set of functions for each instruction set that this processor has.

The library uses neither Python's nor torch's ABI. If it is absent, the package computes with torch.
`choice.py` decides which kernels compute.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

VARIANTS = ("avx512", "avx2", "sse2", "neon")
"""The variants, best first."""
DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    )
}
"""The dtypes that kernels can read, each with its number in lanes.h."""

_FILE = Path(__file__).parent / "kernels.so"
_CHECKSUM = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32)
_BOX = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_SIGNATURES = {
    "crc": (_CHECKSUM, ctypes.c_uint32),
    "copy": ((*_CHECKSUM, ctypes.c_void_p), ctypes.c_uint32),
    "stats": ((*(ctypes.c_void_p, ctypes.c_int64) * 3, ctypes.c_void_p), None),
    "sketch": ((*_BOX, ctypes.c_int64, ctypes.c_void_p), None),
    "generate": ((*_BOX, ctypes.c_int64, ctypes.c_float, ctypes.c_float), None),
    "read": ((ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint64),
}
"""The argument types and the result type of each function."""


@dataclass(frozen=True)
class Kernels:
    """The functions of one variant, by the names that they have in C. Calls release the GIL."""

    variant: str
    crc: Callable[..., int]
    copy: Callable[..., int]
    stats: Callable[..., None]
    sketch: Callable[..., None]
    generate: Callable[..., None]
    read: Callable[..., int]
    """Only reads two tensors: the limit that bench/compare.py compares `stats` with."""


@functools.cache
def load_kernels() -> dict[str, Kernels]:
    """Load the variants that this processor can run, best first; none without the library."""
    if not _FILE.exists():
        return {}
    library = ctypes.CDLL(str(_FILE))
    return {name: _bind(library, name) for name in VARIANTS if getattr(library, f"ttrace_can_run_{name}")()}


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether kernels can read this tensor in place."""
    return tensor.dtype in DTYPES and tensor.is_cpu and tensor.layout is torch.strided


def _bind(library: ctypes.CDLL, variant: str) -> Kernels:
    functions = {}
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, f"ttrace_{name}_{variant}")
        function.argtypes, function.restype = arguments, result
        functions[name] = function
    return Kernels(variant, **functions)
