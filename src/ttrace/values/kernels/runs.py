"""This module hands a region to kernels: per dim the ranges it holds, in as few dims as may be."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges
from ttrace.tensors.region import Region

_Dim = tuple[Ranges, int, int]
"""Ranges of a dim, and the steps from one index to the next in the logical and the local tensor."""


class Dim(ctypes.Structure):
    """As walk.h reads it."""

    _fields_ = (
        ("num_ranges", ctypes.c_int64),
        ("ranges", ctypes.POINTER(ctypes.c_int64)),
        ("logical_step", ctypes.c_int64),
        ("local_step", ctypes.c_int64),
    )


def boxes(region: Region, strides: Sequence[int]) -> Iterator[tuple[ctypes.Array[Dim], int]]:
    """The boxes of a region, each with its offset in a local tensor with these strides; the last stride is 1."""
    logical = _contiguous(region.shape)
    for box in region.boxes():
        local = strides if box.offset is None else _contiguous(box.shape)
        yield _described(list(zip(box.dims, logical, local, strict=True))), box.offset or 0


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _described(dims: list[_Dim]) -> ctypes.Array[Dim]:
    merged = _merged(dims)
    found = []
    for ranges, logical, local in merged:
        bounds = [bound for run in ranges for bound in run]
        found.append(Dim(len(ranges), (ctypes.c_int64 * len(bounds))(*bounds), logical, local))
    return (Dim * len(found))(*found)


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """A dim that is held as a whole becomes part of the one before it, where both tensors go on without a gap."""
    merged: list[_Dim] = []
    for ranges, logical, local in dims:
        if merged and ranges:
            held, outer_logical, outer_local = merged[-1]
            size = outer_logical // logical
            if ranges == rg.whole(size) and outer_local == size * local:
                merged[-1] = (tuple((start * size, stop * size) for start, stop in held), logical, local)
                continue
        merged.append((ranges, logical, local))
    return merged or [(((0, 1),), 1, 1)]
