"""Calls of the kernels that walk a region, described by its ranges in as few dims as possible."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ttrace.layouts import ranges as rg
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region
from ttrace.values.kernels.library import DTYPES, Kernels
from ttrace.values.words import WordStream

Dim = tuple[Ranges, int, int]
"""Ranges of a dim, and its strides in the logical and in the local tensor."""

NORMAL, SIGNED = 0, 1
"""The numbers of the two kinds of recipe in generate.c."""
FILL_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that `fill` can write."""


@dataclass(frozen=True)
class Recipe:
    """How a random word becomes a value: NORMAL or SIGNED, times a factor, plus a mean."""

    kind: int
    factor: float
    mean: float = 0.0


class _DimStruct(ctypes.Structure):
    """A dim as walk.h reads it."""

    _fields_ = (
        ("num_ranges", ctypes.c_int64),
        ("ranges", ctypes.POINTER(ctypes.c_int64)),
        ("logical_step", ctypes.c_int64),
        ("local_step", ctypes.c_int64),
    )


def fill(kernels: Kernels, out: torch.Tensor, region: Region, stream: WordStream, recipe: Recipe) -> torch.Tensor:
    """Fill a contiguous tensor with the generated values of this region."""
    for box in _describe_boxes(out, region, stream):
        kernels.generate(*box, recipe.kind, recipe.factor, recipe.mean)
    return out


def compute_sums(kernels: Kernels, local: torch.Tensor, region: Region, stream: WordStream, k: int) -> torch.Tensor:
    """Compute the sketch of a tensor whose last dim is contiguous; a flat shard is contiguous as a whole."""
    buckets = torch.zeros(k, dtype=torch.float64, device="cpu")
    for box in _describe_boxes(local, region, stream):
        kernels.sketch(*box, k, buckets.data_ptr())
    return buckets


def _describe_boxes(local: torch.Tensor, region: Region, stream: WordStream) -> Iterator[tuple[Any, ...]]:
    """Yield the first arguments of both kernels for each box of a region: address, dtype, dims and stream."""
    begin, size = local.data_ptr(), local.element_size()
    for offset, dims in _plan_boxes(region, local.stride()):
        yield begin + offset * size, DTYPES[local.dtype], dims, len(dims), stream.key, stream.step


@lru_cache(maxsize=256)  # a step has many tensors of a few shapes
def _plan_boxes(region: Region, strides: tuple[int, ...]) -> list[tuple[int, ctypes.Array[_DimStruct]]]:
    return [(offset, _describe_dims(dims)) for offset, dims in plan_dims(region, strides)]


def plan_dims(region: Region, strides: tuple[int, ...]) -> list[tuple[int, list[Dim]]]:
    """List the boxes of a region, each with its offset in a local tensor with these strides, and its merged dims."""
    logical = _compute_strides(region.shape)
    boxes = []
    for box in region.boxes() if region.numel else ():
        local = strides if box.offset is None else _compute_strides(box.shape)
        boxes.append((box.offset or 0, _merge_dims(list(zip(box.dims, logical, local, strict=True)))))
    return boxes


def _compute_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _describe_dims(dims: list[Dim]) -> ctypes.Array[_DimStruct]:
    structs = []
    for ranges, logical, local in dims:
        bounds = [bound for run in ranges for bound in run]
        structs.append(_DimStruct(len(ranges), (ctypes.c_int64 * len(bounds))(*bounds), logical, local))
    return (_DimStruct * len(structs))(*structs)


def _merge_dims(dims: list[Dim]) -> list[Dim]:
    """Merge a dim that is whole into the one before it, if neither tensor has a gap between them."""
    merged: list[Dim] = []
    for ranges, logical, local in dims:
        if merged and ranges:
            held, outer_logical, outer_local = merged[-1]
            size = outer_logical // logical
            if ranges == rg.whole(size) and outer_local == size * local:
                merged[-1] = (tuple((start * size, stop * size) for start, stop in held), logical, local)
                continue
        merged.append((ranges, logical, local))
    return merged or [(((0, 1),), 1, 1)]
