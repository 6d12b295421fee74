"""Chunks of bounded size: work on a tensor then does not need the memory of a second tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from ttrace.layouts import ranges as rg
from ttrace.layouts.region import Region

CHUNK = 1 << 18
"""The number of elements in a chunk. Its temporaries fit into the cache, and are far smaller than a shard."""
DEVICE_CHUNK = 1 << 22
"""The number of elements in a chunk on an accelerator, where each chunk takes about twenty kernel launches."""

Bounds = tuple[tuple[int, int], ...]
"""The first index of a chunk and the index after its last, for each dim."""


def cut_chunks(shape: tuple[int, ...], size: int = CHUNK) -> Iterator[Bounds]:
    """Yield chunks in row-major order, each as one range per dim; the elements of a chunk are consecutive."""
    if not shape:
        yield ()
    if not shape or not math.prod(shape):
        return
    # The first dim whose rows fit is cut into groups of rows; each index of the dims before it has chunks of its own.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= size)
    inner = tuple((0, n) for n in shape[dim + 1 :])
    rows = size // math.prod(shape[dim + 1 :])
    for outer in itertools.product(*(range(n) for n in shape[:dim])):
        corner = tuple((i, i + 1) for i in outer)
        for start in range(0, shape[dim], rows):
            yield (*corner, (start, min(start + rows, shape[dim])), *inner)


def cut_region(region: Region, local: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the region as small boxes, each with its part of the local tensor, in the order of that tensor.

    Not all at once: the indices of a whole shard take more memory than the shard
    (tests/values/test_generate.py::test_making_a_shard_takes_hardly_more_memory_than_the_shard).
    """
    for box in region.boxes():
        part = local
        if box.offset is not None:
            part = local[box.offset : box.offset + math.prod(box.shape)].view(box.shape)
        for cut in cut_chunks(box.shape, CHUNK if local.is_cpu else DEVICE_CHUNK):
            dims = tuple(rg.select(ranges, (run,)) for ranges, run in zip(box.dims, cut, strict=True))
            yield Region(region.shape, dims), part[tuple(slice(*run) for run in cut)]
