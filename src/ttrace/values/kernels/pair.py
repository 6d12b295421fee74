"""This module hands a pair of strided tensors to the kernel that measures their difference."""

from __future__ import annotations

import ctypes
import math

import torch

from ttrace.values.kernels.library import DTYPES, Kernels

Shape = tuple[int, ...]


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
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("strides", ctypes.POINTER(ctypes.c_int64)))


def measured(kernels: Kernels, a: torch.Tensor, b: torch.Tensor, factor: float) -> tuple[Found, Shape | None]:
    """The sums over two tensors of one shape with at least one element, and the index of the largest difference."""
    dims = _order(a, b)
    shape, strides_a, strides_b = _merged(
        [a.shape[dim] for dim in dims], [a.stride(dim) for dim in dims], [b.stride(dim) for dim in dims]
    )
    found = Found()
    kernels.stats(
        ctypes.byref(_described(a, strides_a)),
        ctypes.byref(_described(b, strides_b)),
        _integers(shape),
        ctypes.c_int64(len(shape)),
        ctypes.c_double(factor),
        ctypes.byref(found),
    )
    return found, None if found.max_at < 0 else _index(found.max_at, a.shape, dims)


def _order(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """The dims as they lie in memory, outermost first, so that transposed tensors are read in long rows."""
    if a.is_contiguous() and b.is_contiguous():
        return list(range(a.dim()))
    # A dim that is only expanded (stride 0) is outermost.
    keys = [(-(x or math.inf), -(y or math.inf)) for x, y in zip(a.stride(), b.stride(), strict=True)]
    return sorted(range(a.dim()), key=lambda dim: keys[dim])


def _merged(shape: list[int], a: list[int], b: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The same elements in the same order, in as few dims as may be, at least one."""
    merged: list[tuple[int, int, int]] = []
    for size, x, y in zip(shape, a, b, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (x * size, y * size):
            merged[-1] = (merged[-1][0] * size, x, y)
        else:
            merged.append((size, x, y))
    sizes, xs, ys = zip(*(merged or [(1, 1, 1)]), strict=True)
    return list(sizes), list(xs), list(ys)


def _index(at: int, shape: Shape, dims: list[int]) -> Shape:
    index = [0] * len(dims)
    for dim in reversed(dims):
        at, index[dim] = divmod(at, shape[dim])
    return tuple(index)


def _described(tensor: torch.Tensor, strides: list[int]) -> _Tensor:
    return _Tensor(tensor.data_ptr(), DTYPES[tensor.dtype], _integers(strides))


def _integers(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
