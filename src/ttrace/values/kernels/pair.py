"""This module hands a pair of strided tensors, or of sums of them, to the kernel that measures their difference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from ttrace.values.kernels.library import DTYPES, Kernels

Shape = tuple[int, ...]
Term = tuple[float, torch.Tensor]
"""A factor, and what it applies to."""


class Found(ctypes.Structure):
    """What the kernel found; `max_at` counts in the order of `Walk.dims`."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("aa", "bb", "dd", "ab", "max_diff")),
        *((name, ctypes.c_int64) for name in ("max_at", "nan_a", "inf_a", "nan_b", "inf_b")),
    )
    aa: float
    bb: float
    dd: float
    ab: float
    max_diff: float
    max_at: int
    nan_a: int
    inf_a: int
    nan_b: int
    inf_b: int


class _Tensor(ctypes.Structure):
    """As gather.h reads it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("factor", ctypes.c_double),
    )


def measured(kernels: Kernels, a: Sequence[Term], b: Sequence[Term]) -> tuple[Found, Shape | None]:
    """The sums over two sums of tensors, all of one shape with at least one element, and where they differ most."""
    tensors = [tensor for _, tensor in (*a, *b)]
    dims = _order(tensors)
    walked = [(tensors[0].shape[dim], *(tensor.stride(dim) for tensor in tensors)) for dim in dims]
    sizes, *strides = zip(*_merged(walked or [(1,) * (1 + len(tensors))]), strict=True)
    described = [
        _Tensor(tensor.data_ptr(), DTYPES[tensor.dtype], _integers(steps), factor)
        for (factor, tensor), steps in zip((*a, *b), strides, strict=True)
    ]
    found = Found()
    kernels.stats(
        (_Tensor * len(a))(*described[: len(a)]),
        ctypes.c_int64(len(a)),
        (_Tensor * len(b))(*described[len(a) :]),
        ctypes.c_int64(len(b)),
        _integers(sizes),
        ctypes.c_int64(len(sizes)),
        ctypes.byref(found),
    )
    return found, None if found.max_at < 0 else _index(found.max_at, tensors[0].shape, dims)


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The dims as they lie in memory, outermost first, so that transposed tensors are read in long rows."""
    dims = range(tensors[0].dim())
    if all(tensor.is_contiguous() for tensor in tensors):
        return list(dims)
    # A dim that is only expanded (stride 0) is outermost.
    return sorted(dims, key=lambda dim: [-(tensor.stride()[dim] or math.inf) for tensor in tensors])


def _merged(dims: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Sizes and strides of the same elements in the same order, in as few dims as may be, at least one."""
    merged: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if size == 1:
            continue
        if merged and list(merged[-1][1:]) == [stride * size for stride in strides]:
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    return merged or [dims[0]]


def _index(at: int, shape: Shape, dims: list[int]) -> Shape:
    index = [0] * len(dims)
    for dim in reversed(dims):
        at, index[dim] = divmod(at, shape[dim])
    return tuple(index)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
