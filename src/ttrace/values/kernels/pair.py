"""Calls of the kernel that measures the difference of two strided tensors, or of two sums of them."""

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
"""A factor and its tensor."""


class PairSums(ctypes.Structure):
    """The sums that the kernel computes; `max_at` counts elements in the order of `_Walk.order`."""

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
    """A tensor as gather.h reads it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("factor", ctypes.c_double),
    )
    data: int


_TENSOR_BYTES = ctypes.sizeof(_Tensor)


def measure_pair(kernels: Kernels, a: Sequence[Term], b: Sequence[Term]) -> tuple[PairSums, Shape | None]:
    """Measure two sums of tensors, all of one shape with at least one element, and find where they differ most."""
    terms = (*a, *b)
    shape = tuple(terms[0][1].shape)
    walk = _plan_walk(shape, tuple([(factor, tensor.dtype, tensor.stride()) for factor, tensor in terms]))
    descriptors = walk.copy_descriptors()
    for each, (_, tensor) in zip(descriptors, terms, strict=True):
        each.data = tensor.data_ptr()
    address, sums = ctypes.addressof(descriptors), PairSums()
    kernels.stats(
        address,
        len(a),
        address + len(a) * _TENSOR_BYTES,
        len(b),
        walk.sizes,
        len(walk.sizes),
        ctypes.byref(sums),
    )
    return sums, None if sums.max_at < 0 else _find_index(sums.max_at, shape, walk.order)


@dataclass(frozen=True)
class _Walk:
    """The order in which tensors of one shape are read together, merged to as few dims as possible."""

    order: Sequence[int]
    sizes: ctypes.Array[ctypes.c_int64]
    strides: Sequence[ctypes.Array[ctypes.c_int64]]
    """One for each tensor. They are stored here because `descriptors` has their addresses."""
    descriptors: ctypes.Array[_Tensor]
    """The tensors, without the addresses of their data."""

    def copy_descriptors(self) -> ctypes.Array[_Tensor]:
        return type(self.descriptors).from_buffer_copy(self.descriptors)


@lru_cache(maxsize=256)  # a model has many tensors of a few shapes
def _plan_walk(shape: Shape, tensors: tuple[tuple[float, torch.dtype, Shape], ...]) -> _Walk:
    """Plan how to read tensors of one shape; each has its factor, its dtype and its strides."""
    strides = tuple(steps for _, _, steps in tensors)
    order = _order_dims(shape, strides)
    walked = [(shape[dim], *(steps[dim] for steps in strides)) for dim in order]
    sizes, *merged = zip(*_merge_dims(walked or [(1,) * (1 + len(strides))]), strict=True)
    arrays = [_to_array(steps) for steps in merged]
    descriptors = [
        _Tensor(None, DTYPES[dtype], steps, factor) for (factor, dtype, _), steps in zip(tensors, arrays, strict=True)
    ]
    return _Walk(order, _to_array(sizes), arrays, (_Tensor * len(tensors))(*descriptors))


def _order_dims(shape: Shape, strides: tuple[Shape, ...]) -> list[int]:
    """Order the dims as in memory, outermost first, so that transposed tensors are read in long rows."""
    # An expanded dim (stride 0) is outermost; a dim of a single element may have any stride.
    return sorted(
        range(len(shape)), key=lambda dim: [-(steps[dim] or math.inf) if shape[dim] > 1 else 0 for steps in strides]
    )


def _merge_dims(dims: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merge dims: the same elements in the same order, in as few dims as possible, at least one."""
    merged: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if size == 1:
            continue
        if merged and list(merged[-1][1:]) == [stride * size for stride in strides]:
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    return merged or [dims[0]]


def _find_index(at: int, shape: Shape, dims: Sequence[int]) -> Shape:
    index = [0] * len(dims)
    for dim in reversed(dims):
        at, index[dim] = divmod(at, shape[dim])
    return tuple(index)


def _to_array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
