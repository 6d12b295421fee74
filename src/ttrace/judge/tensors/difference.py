"""Difference of one tensor between the two sides: rank by rank, and the elements that differ most."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.errors import TTraceError
from ttrace.judge.tensors.logical import LogicalTensor, Piece, factor_to_come, measure
from ttrace.judge.verdict import UNEXAMINED, Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import Provenance
from ttrace.layouts.region import Shape
from ttrace.trace.reader import Trace
from ttrace.values.chunks import cut_chunks
from ttrace.values.stats import Stats, add_terms

NUM_ELEMENTS = 5
"""How many of the elements that differ most are listed."""
_MOST_NAMED = 4
"""A list of more numbers is hard to read, and is described by what its members share."""


@dataclass(frozen=True)
class RankDifference:
    """One shard compared with the same region of the reference. A summand alone is expected to differ."""

    where: str
    region: str
    stats: Stats


@dataclass(frozen=True)
class ReplicaDifference:
    """One replica of the whole tensor, made of one shard of each part, compared with the reference."""

    where: str
    stats: Stats


@dataclass(frozen=True)
class Element:
    """One element of the logical tensor, with its value on both sides."""

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
    """The factor that the candidate's reduction still applies; it is included in all numbers here."""
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
                f"{tensor_id}: the {side} has not recorded this tensor. `ttrace show {trace.folder}` lists all tensors."
            )
    a = LogicalTensor.of(reference, tensor_id)
    b = LogicalTensor.of(candidate, tensor_id, a.shape if a else None)
    if a is None or b is None or a.shape != b.shape:
        raise TTraceError(
            f"{tensor_id}: the layouts of reference and candidate do not match. Add a rule for this site."
        )
    factor = factor_to_come(tensor_id, reference, candidate)
    elements = [element for piece in b.pieces for element in _find_worst(a, b, piece, factor)]
    most = heapq.nlargest(NUM_ELEMENTS, elements, key=_measure_gap)
    replicas = tuple(_measure_replicas(a, b, factor, candidate.mesh))
    ranks = tuple(_measure_ranks(a, b, factor))
    return Difference(tensor_id, a.shape, b.layout, b.by, b.pending, factor, replicas, ranks, tuple(most))


def _measure_replicas(a: LogicalTensor, b: LogicalTensor, factor: float, mesh: Mesh) -> Iterator[ReplicaDifference]:
    """Measure the first replica of all parts, then the second, and so on; a part with fewer repeats its last one."""
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
    """Yield the elements of one region that differ most, of every replica; of summands, only their sum is compared."""
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


def name_ranks(ranks: Collection[int], among: Collection[int], mesh: Mesh) -> str:
    """Name some of the ranks: by their numbers or, if they are many, by their place on the axis that they share."""
    if len(ranks) <= _MOST_NAMED:
        return f"rank {', '.join(map(str, sorted(ranks)))}"
    return name_by_axis(ranks, among, mesh)[0]


def name_by_axis(ranks: Collection[int], among: Collection[int], mesh: Mesh) -> tuple[str, str | None]:
    """Name ranks by the axis that distinguishes them from the others, and return that axis: "dp rank 1"."""
    for axis, size in mesh.sizes.items():
        places = {mesh.coord(rank)[axis] for rank in ranks}
        alike = {rank for rank in among if mesh.coord(rank)[axis] in places}
        if size > 1 and alike == set(ranks) and len(alike) < len(among):
            return f"{axis} rank{'s' * (len(places) > 1)} {enumerate_few(sorted(places))}", axis
    return f"rank{'s' * (len(ranks) > 1)} {enumerate_few(sorted(ranks))}", None


def enumerate_few(numbers: Sequence[int]) -> str:
    """List numbers in words: all of them, or the first few and how many more."""
    if len(numbers) > _MOST_NAMED:
        return f"{', '.join(map(str, numbers[:_MOST_NAMED]))} and {len(numbers) - _MOST_NAMED} more"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def add_microbatches(findings: Sequence[Finding], comparisons: Sequence[Comparison], candidate: Trace) -> list[Finding]:
    """Add which microbatches are wrong at each finding's site and which ranks ran them, if some are right."""
    by_site: dict[TensorId, list[Comparison]] = {}
    for comparison in comparisons:
        by_site.setdefault(comparison.id._replace(microbatch=None), []).append(comparison)
    sites = (by_site.get(finding.comparison.id._replace(microbatch=None), ()) for finding in findings)
    return [_add_microbatches(finding, site, candidate) for finding, site in zip(findings, sites, strict=True)]


def _add_microbatches(finding: Finding, at_site: Sequence[Comparison], candidate: Trace) -> Finding:
    if finding.comparison.id.microbatch is None or finding.cause is UNEXAMINED:
        return finding
    here = {c.id.microbatch: c for c in at_site}
    wrong = {microbatch: c.id for microbatch, c in here.items() if microbatch is not None and c.verdict.is_wrong}
    right = {mb: c.id for mb, c in here.items() if mb is not None and c.verdict is Verdict.PASS}
    if not wrong or not right:
        return finding
    which = f"microbatch{'es' * (len(wrong) > 1)} {enumerate_few(sorted(wrong))}"
    verb = "are" if len(wrong) > 1 else "is"
    ran, others = (_ranks(ids.values(), candidate) for ids in (wrong, right))
    if ran & others:
        return _add_evidence(finding, f"of {len(wrong) + len(right)} microbatches only {which} {verb} wrong")
    who, axis = name_by_axis(ran, ran | others, candidate.mesh)
    words = f"only {which} {verb} wrong: {'those' if len(wrong) > 1 else 'that'} of {who}"
    if len(wrong) > _MOST_NAMED:
        words = f"only the {len(wrong)} microbatches of {who} are wrong"
    if finding.cause.name is CauseName.UNEXPLAINED:
        return replace(finding, cause=Cause(CauseName.SOME_RANKS, words, axis, finding.cause.evidence))
    return _add_evidence(finding, words)


def _add_evidence(finding: Finding, words: str) -> Finding:
    return replace(finding, cause=replace(finding.cause, evidence=(*finding.cause.evidence, words)))


def _ranks(ids: Collection[TensorId], candidate: Trace) -> set[int]:
    return {shard.coord.rank for tensor_id in ids for shard in candidate.shards.get(tensor_id, ())}
