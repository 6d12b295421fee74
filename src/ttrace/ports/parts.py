"""Parts: where the rows of one tensor lie in the whole that several tensors make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttrace.errors import CaptureError
from ttrace.layouts.region import Region
from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges


@dataclass(frozen=True)
class Part:
    """The rows of a whole that one tensor holds."""

    whole: str
    """The name of the whole."""
    number: int
    size: int
    """The number of rows of the whole."""
    rows: Ranges
    count: int = 1
    """The number of parts of the whole."""
    is_stacked: bool = False
    """Whether the whole has one dim more, along which this is one row."""

    def place(self, region: Region, dim: int) -> Region:
        """Return a region of the part as a region of the whole, whose rows are along this dim."""
        shape, dims = list(region.shape), list(region.dims)
        if self.is_stacked:
            shape.insert(0, self.size)
            dims.insert(0, self.rows)
        else:
            shape[dim] = self.size
            dims[dim] = rg.select(self.rows, dims[dim])
        return Region(tuple(shape), tuple(dims), region.flat)


def place_rows(sizes: Sequence[int], number: int, *, groups: int = 1, head: int = 0) -> Ranges:
    """Return the rows that a part has in the whole.

    `sizes` are the rows of all parts. The whole consists of groups, each with its share of every part in order. With
    `head`, the halves of each head of this size, which rotary embeddings rotate into each other, become neighbours.
    """
    if groups < 1 or any(size % groups for size in sizes) or (head and (head % 2 or sizes[number] % head)):
        raise CaptureError(f"parts of {', '.join(map(str, sizes))} rows have no {groups} groups with heads of {head}.")
    shares = [size // groups for size in sizes]
    begin, share, step = sum(shares[:number]), shares[number], sum(shares)
    rows = rg.merge((group * step + begin, group * step + begin + share) for group in range(groups))
    return rg.select(rows, _pair_halves(sizes[number], head)) if head else rows


def _pair_halves(size: int, head: int) -> Ranges:
    places = torch.arange(head, device="cpu").view(head // 2, 2).t().reshape(-1)
    starts = torch.arange(0, size, head, device="cpu")
    return rg.from_indices((starts[:, None] + places).reshape(-1))
