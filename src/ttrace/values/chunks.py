"""This module cuts a box into pieces of bounded size, so that working on a tensor takes no second tensor's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from ttrace.tensors import ranges as rg
from ttrace.tensors.region import Region

CHUNK = 1 << 18
"""Elements worked on at a time: the temporaries of one chunk stay in cache and far below any shard."""

Bounds = tuple[tuple[int, int], ...]


def cut_chunks(shape: tuple[int, ...], size: int = CHUNK) -> Iterator[Bounds]:
    """One range per dim and piece. Each piece is a run of the row-major order, and they come in that order."""
    if not shape:
        yield ()
    if not shape or not math.prod(shape):
        return
    # The first dim whose rows fit is cut into runs of rows; the dims in front of it are walked one by one.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= size)
    inner = tuple((0, n) for n in shape[dim + 1 :])
    rows = size // math.prod(shape[dim + 1 :])
    for outer in itertools.product(*(range(n) for n in shape[:dim])):
        corner = tuple((i, i + 1) for i in outer)
        for start in range(0, shape[dim], rows):
            yield (*corner, (start, min(start + rows, shape[dim])), *inner)


def cut_region(region: Region, local: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
    """The region as small boxes, each with its part of the local tensor, in the order in which that holds them.

    Even the indices of a whole shard would take more memory than the shard
    (tests/values/test_generate.py::test_making_a_shard_takes_hardly_more_memory_than_the_shard).
    """
    for box in region.boxes():
        held = local
        if box.offset is not None:
            held = local[box.offset : box.offset + math.prod(box.shape)].view(box.shape)
        for cut in cut_chunks(box.shape):
            dims = tuple(rg.select(ranges, (run,)) for ranges, run in zip(box.dims, cut, strict=True))
            yield Region(region.shape, dims), held[tuple(slice(*run) for run in cut)]
