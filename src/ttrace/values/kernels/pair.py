"""This module hands a pair of strided tensors, or of sums of them, to the kernel that measures their difference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ttrace.values.kernels.library import DTYPES, Kernels

Shape = tuple[int, ...]
Term = tuple[float, torch.Tensor]
"""A factor, and what it applies to."""


class PairSums(ctypes.Structure):
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


def measure_pair(kernels: Kernels, a: Sequence[Term], b: Sequence[Term]) -> tuple[PairSums, Shape | None]:
    """The sums over two sums of tensors, all of one shape with at least one element, and where they differ most."""
    shape = tuple(a[0][1].shape)
    walk = _walk(shape, tuple(tensor.stride() for _, tensor in (*a, *b)))
    described = [
        _Tensor(tensor.data_ptr(), DTYPES[tensor.dtype], steps, factor)
        for (factor, tensor), steps in zip((*a, *b), walk.strides, strict=True)
    ]
    found = PairSums()
    kernels.stats(
        (_Tensor * len(a))(*described[: len(a)]),
        ctypes.c_int64(len(a)),
        (_Tensor * len(b))(*described[len(a) :]),
        ctypes.c_int64(len(b)),
        walk.sizes,
        ctypes.c_int64(len(walk.sizes)),
        ctypes.byref(found),
    )
    return found, None if found.max_at < 0 else _index(found.max_at, shape, walk.order)


@dataclass(frozen=True)
class _Walk:
    """How tensors of one shape are read together: in which order of dims, in as few as may be."""

    order: Sequence[int]
    sizes: ctypes.Array[ctypes.c_int64]
    strides: Sequence[ctypes.Array[ctypes.c_int64]]
    """Of each tensor."""


@lru_cache(maxsize=256)  # a model has many tensors of a few shapes
def _walk(shape: Shape, strides: tuple[Shape, ...]) -> _Walk:
    order = _order(shape, strides)
    walked = [(shape[dim], *(steps[dim] for steps in strides)) for dim in order]
    sizes, *merged = zip(*_merged(walked or [(1,) * (1 + len(strides))]), strict=True)
    return _Walk(order, _integers(sizes), [_integers(steps) for steps in merged])


def _order(shape: Shape, strides: tuple[Shape, ...]) -> list[int]:
    """The dims as they lie in memory, outermost first, so that transposed tensors are read in long rows."""
    # A dim that is only expanded (stride 0) is outermost; one of a single element may have any stride.
    return sorted(
        range(len(shape)), key=lambda dim: [-(steps[dim] or math.inf) if shape[dim] > 1 else 0 for steps in strides]
    )


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


def _index(at: int, shape: Shape, dims: Sequence[int]) -> Shape:
    index = [0] * len(dims)
    for dim in reversed(dims):
        at, index[dim] = divmod(at, shape[dim])
    return tuple(index)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
