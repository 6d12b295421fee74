"""This module hands regions to the kernels that walk them: per dim the ranges held, in as few dims as may be."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges
from ttrace.tensors.region import Region
from ttrace.values.kernels.library import DTYPES, Kernels
from ttrace.values.words import WordStream

_Dim = tuple[Ranges, int, int]
"""Ranges of a dim, and the steps from one index to the next in the logical and the local tensor."""


NORMAL, SIGNED = 0, 1
"""As generate.c counts them."""
FILL_DTYPES = (torch.float32, torch.bfloat16)
"""What `fill` can write."""


@dataclass(frozen=True)
class Recipe:
    """What is made of each random word: NORMAL or SIGNED, times a factor, plus a mean."""

    kind: int
    factor: float
    mean: float = 0.0


class _Described(ctypes.Structure):
    """As walk.h reads a dim."""

    _fields_ = (
        ("num_ranges", ctypes.c_int64),
        ("ranges", ctypes.POINTER(ctypes.c_int64)),
        ("logical_step", ctypes.c_int64),
        ("local_step", ctypes.c_int64),
    )


def fill(kernels: Kernels, out: torch.Tensor, region: Region, stream: WordStream, recipe: Recipe) -> torch.Tensor:
    """Fill a contiguous tensor with the generated values of this region."""
    for box in _boxes(out, region, stream):
        kernels.generate(*box, ctypes.c_int64(recipe.kind), ctypes.c_float(recipe.factor), ctypes.c_float(recipe.mean))
    return out


def compute_sums(kernels: Kernels, local: torch.Tensor, region: Region, stream: WordStream, k: int) -> torch.Tensor:
    """The sketch of a tensor whose last dim has no gaps; a flat shard has none at all."""
    found = torch.zeros(k, dtype=torch.float64)
    for box in _boxes(local, region, stream):
        kernels.sketch(*box, ctypes.c_int64(k), ctypes.c_void_p(found.data_ptr()))
    return found


def _boxes(local: torch.Tensor, region: Region, stream: WordStream) -> Iterator[tuple[Any, ...]]:
    """For each box of a region what both kernels take first: where it begins, its dtype, its dims and the stream."""
    begin, size = local.data_ptr(), local.element_size()
    for offset, dims in _walked(region, local.stride()):
        numbers = (ctypes.c_int64(number) for number in (len(dims), stream.key, stream.step))
        yield ctypes.c_void_p(begin + offset * size), ctypes.c_int64(DTYPES[local.dtype]), dims, *numbers


@lru_cache(maxsize=256)  # a step has many tensors of a few shapes
def _walked(region: Region, strides: tuple[int, ...]) -> list[tuple[int, ctypes.Array[_Described]]]:
    """The boxes of a region, each with its offset in a local tensor with these strides."""
    logical = _contiguous(region.shape)
    return [
        (
            box.offset or 0,
            _described(
                list(zip(box.dims, logical, strides if box.offset is None else _contiguous(box.shape), strict=True))
            ),
        )
        for box in (region.boxes() if region.numel else ())
    ]


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _described(dims: list[_Dim]) -> ctypes.Array[_Described]:
    merged = _merged(dims)
    found = []
    for ranges, logical, local in merged:
        bounds = [bound for run in ranges for bound in run]
        found.append(_Described(len(ranges), (ctypes.c_int64 * len(bounds))(*bounds), logical, local))
    return (_Described * len(found))(*found)


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
