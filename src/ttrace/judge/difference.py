"""This module looks closely at one id: rank by rank, and at the elements that differ most."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import torch

from ttrace.errors import TTraceError
from ttrace.judge.logical import Logical, Piece, measured
from ttrace.tensors.ids import TensorId
from ttrace.tensors.region import Shape
from ttrace.trace.reader import Shard, Trace
from ttrace.values.stats import Stats

NUM_ELEMENTS = 5


@dataclass(frozen=True)
class RankDifference:
    """One shard against the reference's same region. A summand alone is expected to differ."""

    where: str
    region: str
    stats: Stats


@dataclass(frozen=True)
class Element:
    """One element of the logical tensor, as both sides have it."""

    index: Shape
    reference: float
    candidate: float
    where: str


@dataclass(frozen=True)
class Difference:
    """All there is to say about one id."""

    id: TensorId
    shape: Shape
    layout: str
    by: str
    pending: tuple[str, ...]
    total: Stats
    ranks: tuple[RankDifference, ...]
    elements: tuple[Element, ...]


def difference(reference: Trace, candidate: Trace, tensor_id: TensorId) -> Difference:
    """Compare one id shard by shard."""
    for side, trace in (("reference", reference), ("candidate", candidate)):
        if tensor_id not in trace.shards:
            raise TTraceError(
                f"{tensor_id}: the {side} recorded no such tensor. `ttrace show {trace.folder}` lists all."
            )
    a = Logical.found(reference, tensor_id)
    b = Logical.found(candidate, tensor_id, a.shape if a else None)
    if a is None or b is None or a.shape != b.shape:
        raise TTraceError(f"{tensor_id}: the two sides cannot be laid over each other. Add a rule for this site.")
    ranks, elements = [], []
    for piece in b.pieces:
        for shard in (shard for replicas in piece.summands for shard in replicas):
            alone = replace(b, pieces=(Piece(piece.region, ((shard,),)),), pending=())
            ranks.append(RankDifference(str(shard.coord), str(piece.region), measured(a, alone)[0]))
            elements += _worst(a, piece, shard)
    most = heapq.nlargest(NUM_ELEMENTS, elements, key=lambda element: abs(element.reference - element.candidate))
    return Difference(tensor_id, a.shape, b.layout, b.by, b.pending, measured(a, b)[0], tuple(ranks), tuple(most))


def _worst(a: Logical, piece: Piece, shard: Shard) -> list[Element]:
    found = []
    tensor = shard.tensor()
    for other in a.pieces:
        theirs = other.tensor()
        for part_a, part_b in other.region.overlaps(piece.region):
            x, y = part_a.of(theirs).to(torch.float64), part_b.of(tensor).to(torch.float64)
            gaps = torch.nan_to_num((x - y).abs().reshape(-1), nan=torch.inf)
            for at in gaps.topk(min(NUM_ELEMENTS, gaps.numel())).indices.tolist():
                index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
                values = float(x[index]), float(y[index])
                found.append(Element(part_a.global_index(index), *values, str(shard.coord)))
    return found
