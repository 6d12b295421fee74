"""Chunks of bounded size, so that work on a tensor does not need the memory of a second one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from ttrace.layouts.region import Region
from ttrace.tensors import ranges as rg

CHUNK = 1 << 18
"""Elements in a chunk: its temporaries fit into the cache, and are far smaller than a shard."""
DEVICE_CHUNK = 1 << 22
"""The same on accelerators, where each chunk takes some twenty launches."""

Bounds = tuple[tuple[int, int], ...]
"""The first index and the end of a chunk, per dim."""


def cut_chunks(shape: tuple[int, ...], size: int = CHUNK) -> Iterator[Bounds]:
    """Yield chunks, each as one range per dim. Each is a run in row-major order, and they come in that order."""
    if not shape:
        yield ()
    if not shape or not math.prod(shape):
        return
    # The first dim whose rows fit is cut into runs of rows; of the dims before it, each index is visited.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= size)
    inner = tuple((0, n) for n in shape[dim + 1 :])
    rows = size // math.prod(shape[dim + 1 :])
    for outer in itertools.product(*(range(n) for n in shape[:dim])):
        corner = tuple((i, i + 1) for i in outer)
        for start in range(0, shape[dim], rows):
            yield (*corner, (start, min(start + rows, shape[dim])), *inner)


def cut_region(region: Region, local: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the region as small boxes, each with its part of the local tensor, in the order of that tensor.

    The indices of a whole shard alone would take more memory than the shard
    (tests/values/test_generate.py::test_making_a_shard_takes_hardly_more_memory_than_the_shard).
    """
    for box in region.boxes():
        held = local
        if box.offset is not None:
            held = local[box.offset : box.offset + math.prod(box.shape)].view(box.shape)
        for cut in cut_chunks(box.shape, CHUNK if local.is_cpu else DEVICE_CHUNK):
            dims = tuple(rg.select(ranges, (run,)) for ranges, run in zip(box.dims, cut, strict=True))
            yield Region(region.shape, dims), held[tuple(slice(*run) for run in cut)]
