"""Error maps: where in a tensor the error is, in coarse blocks of the logical tensor, rank by rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ttrace.errors import SketchError
from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.tensors.logical import LogicalTensor, Piece
from ttrace.judge.tensors.values import Values
from ttrace.judge.verdict import Comparison
from ttrace.layouts.region import Region, Shape
from ttrace.trace.reader import Trace

MOST_BLOCKS = 32
"""The largest number of blocks along each of the two sides of a map."""
MOST_RANKS = 8
_MOST_ELEMENTS = 1 << 20
"""Larger shards are sampled at evenly spread elements."""


@dataclass(frozen=True)
class RankMap:
    """The error of one shard by block, relative to the reference's root mean square; NaN where it has no element."""

    where: str
    region: str
    blocks: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ErrorMap:
    """A logical tensor seen as rows (all dims but the last) and columns, cut into blocks."""

    shape: Shape
    ranks: tuple[RankMap, ...]
    num_ranks: int
    """The number of all shards; only the first `MOST_RANKS` are mapped."""


def map_error(comparison: Comparison, reference: Trace, candidate: Trace) -> ErrorMap | None:
    """Map the error of a tensor; None if the shapes differ or only sketches were recorded."""
    evidence = Evidence.of(comparison, reference, candidate)
    if evidence is None or evidence.reference.shape != evidence.candidate.shape or not comparison.stats.count:
        return None
    try:
        whole = Values(evidence.reference)
        shown = [(where, part, Values(part, evidence.factor)) for where, part in _list_parts(evidence.candidate)]
    except SketchError:
        return None
    size = comparison.stats.norm / math.sqrt(comparison.stats.count) or 1.0
    ranks = tuple(
        RankMap(where, str(region := part.pieces[0].region), _measure_blocks(whole, region, values, size))
        for where, part, values in shown[:MOST_RANKS]
    )
    return ErrorMap(evidence.reference.shape, ranks, len(shown))


def _list_parts(candidate: LogicalTensor) -> Iterator[tuple[str, LogicalTensor]]:
    """List every shard alone or, if a sum is pending, each region with its summands added up."""
    for piece in candidate.pieces:
        if candidate.pending:
            yield f"summed over {', '.join(candidate.pending)}", replace(candidate, pieces=(piece,))
        else:
            for shard in piece.summands[0]:
                yield str(shard.coord), replace(candidate, pieces=(Piece(piece.region, ((shard,),)),))


def _measure_blocks(reference: Values, region: Region, part: Values, size: float) -> tuple[tuple[float, ...], ...]:
    width = region.shape[-1] if region.shape else 1
    height = math.prod(region.shape) // width
    num_rows, num_columns = min(height, MOST_BLOCKS), min(width, MOST_BLOCKS)
    index = _sample_elements(region)
    x, y = reference.read_elements(index), part.read_elements(index)
    row = torch.div(index, width, rounding_mode="floor") * num_rows // height
    block = row * num_columns + index % width * num_columns // width
    count = torch.bincount(block, minlength=num_rows * num_columns)
    gaps = (x - y).square().nan_to_num(nan=torch.inf, posinf=torch.inf)
    squares = torch.bincount(block, weights=gaps, minlength=num_rows * num_columns)
    rows = ((squares / count).sqrt() / size).view(num_rows, num_columns)
    return tuple(map(tuple, rows.tolist()))


def _sample_elements(region: Region) -> torch.Tensor:
    """Sample elements of a shard, as row-major indices of the logical tensor."""
    width = region.box_shape[-1] if region.box_shape else 1
    stride = -(-region.numel // _MOST_ELEMENTS)
    while stride > 1 and math.gcd(stride, width) > 1:
        stride += 1  # with a common divisor, some columns would never be sampled
    return region.look_up(torch.arange(0, region.numel, stride, device="cpu"))
