"""Difference of one tensor between the two sides: rank by rank, and the elements that differ most."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ttrace.errors import TTraceError
from ttrace.judge.tensors.factor import factor_to_come
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure
from ttrace.judge.tensors.rank_names import name_ranks
from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.region import Shape
from ttrace.layouts.source import Provenance
from ttrace.trace.reader import Trace
from ttrace.values.chunks import cut_chunks
from ttrace.values.compare import add_terms
from ttrace.values.stats import Stats

NUM_ELEMENTS = 5


@dataclass(frozen=True)
class RankDifference:
    """One shard compared with the same region of the reference. A summand alone is expected to differ."""

    where: str
    region: str
    stats: Stats


@dataclass(frozen=True)
class ReplicaDifference:
    """One replica of the whole tensor compared with the reference: of each part, a shard of one of its holders."""

    where: str
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
    """The difference of one tensor."""

    id: TensorId
    shape: Shape
    layout: str
    by: Provenance | None
    pending: tuple[str, ...]
    factor: float
    """What the candidate's reduction still applies; it is included in all numbers here."""
    replicas: tuple[ReplicaDifference, ...]
    """All replicas of the whole tensor, the first one first."""
    ranks: tuple[RankDifference, ...]
    elements: tuple[Element, ...]

    @property
    def total(self) -> Stats:
        """The first replica's, as in a check."""
        return self.replicas[0].stats

    @property
    def worst(self) -> ReplicaDifference | None:
        """The replica with the largest error; None if all replicas measure the same."""
        if all(replica.stats == self.total for replica in self.replicas):
            return None
        return max(self.replicas, key=lambda replica: replica.stats.error)


def find_difference(reference: Trace, candidate: Trace, tensor_id: TensorId) -> Difference:
    """Compare one id shard by shard."""
    for side, trace in (("reference", reference), ("candidate", candidate)):
        if tensor_id not in trace.shards:
            raise TTraceError(
                f"{tensor_id}: the {side} recorded no such tensor. `ttrace show {trace.folder}` lists all."
            )
    a = LogicalTensor.of(reference, tensor_id)
    b = LogicalTensor.of(candidate, tensor_id, a.shape if a else None)
    if a is None or b is None or a.shape != b.shape:
        raise TTraceError(f"{tensor_id}: the two sides cannot be laid over each other. Add a rule for this site.")
    factor = factor_to_come(tensor_id, reference, candidate)
    elements = [element for piece in b.pieces for element in _find_worst(a, b, piece, factor)]
    most = heapq.nlargest(NUM_ELEMENTS, elements, key=_measure_gap)
    replicas = tuple(_measure_replicas(a, b, factor, candidate.mesh))
    ranks = tuple(_measure_ranks(a, b, factor))
    return Difference(tensor_id, a.shape, b.layout, b.by, b.pending, factor, replicas, ranks, tuple(most))


def _measure_replicas(a: LogicalTensor, b: LogicalTensor, factor: float, mesh: Mesh) -> Iterator[ReplicaDifference]:
    """Measure the first holders of all parts, then the second ones, and so on; a part with fewer repeats its last."""
    for number in range(max(len(holders) for piece in b.pieces for holders in piece.summands)):
        pieces = tuple(
            Piece(piece.region, tuple((holders[min(number, len(holders) - 1)],) for holders in piece.summands))
            for piece in b.pieces
        )
        coords = {holder.coord.rank: holder.coord for piece in pieces for (holder,) in piece.summands}
        where = str(*coords.values()) if len(coords) == 1 else name_ranks(coords, range(mesh.num_ranks), mesh)
        yield ReplicaDifference(where, measure(a, replace(b, pieces=pieces), factor=factor)[0])


def _measure_ranks(a: LogicalTensor, b: LogicalTensor, factor: float) -> Iterator[RankDifference]:
    for piece in b.pieces:
        for shard in (shard for replicas in piece.summands for shard in replicas):
            alone = replace(b, pieces=(Piece(piece.region, ((shard,),)),), pending=())
            yield RankDifference(str(shard.coord), str(piece.region), measure(a, alone, factor=factor)[0])


def _find_worst(a: LogicalTensor, b: LogicalTensor, piece: Piece, factor: float) -> Iterator[Element]:
    """The elements of one region that differ most: of every replica, but of summands only their sum."""
    if b.pending:
        yield from _find_elements(a, piece, factor, f"summed over {', '.join(b.pending)}")
        return
    for shard in piece.summands[0]:
        yield from _find_elements(a, Piece(piece.region, ((shard,),)), factor, str(shard.coord))


def _find_elements(a: LogicalTensor, piece: Piece, factor: float, where: str) -> Iterator[Element]:
    theirs = piece.terms()
    for other in a.pieces:
        ours = other.terms()
        for part_a, part_b in other.region.overlaps(piece.region):
            xs = [(sign, part_a.of(term)) for sign, term in ours]
            ys = [(factor * sign, part_b.of(term)) for sign, term in theirs]
            for cut in cut_chunks(tuple(xs[0][1].shape)):
                here = tuple(slice(*run) for run in cut)
                x, y = (add_terms(terms, here).to(torch.float64) for terms in (xs, ys))
                gaps = torch.nan_to_num((x - y).abs().reshape(-1), nan=torch.inf)
                for at in gaps.topk(min(NUM_ELEMENTS, gaps.numel())).indices:
                    index = tuple(int(i) for i in torch.unravel_index(at, x.shape))
                    inside = tuple(start + i for (start, _), i in zip(cut, index, strict=True))
                    yield Element(part_a.global_index(inside), float(x[index]), float(y[index]), where)


def _measure_gap(element: Element) -> float:
    gap = abs(element.reference - element.candidate)
    return math.inf if math.isnan(gap) else gap
