"""Comparison of one id: whether the candidate's shards make up the reference's tensor, and how far they are off.

Two kinds of tensors are judged in their own way: discrete decisions, which may differ only where rounding may change
the order of the scores, and values that each data-parallel rank computes from its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ttrace.judge.reason import Reason, Why
from ttrace.judge.tensors.logical import LogicalTensor, Piece, factor_to_come, measure, measure_shards
from ttrace.judge.tensors.values import Values
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.scale import judge_scale
from ttrace.judge.tolerance.twins import TINY, is_zero, replica_tolerance
from ttrace.judge.verdict import Comparison, RegionError, Tolerance, Verdict
from ttrace.layouts.ids import Kind, TensorId, make_scores_slot
from ttrace.layouts.placement import INFERRED, LayoutSource, Provenance
from ttrace.trace.reader import Shard, Trace
from ttrace.values.stats import LEAST_DIVISOR, Stats

_FIRST_FORWARD = Provenance(LayoutSource.FIRST_FORWARD)
_FORWARD = (Kind.INPUT, Kind.OUTPUT, Kind.CALL)
_AROUND_STEP = (Kind.BUFFER_AFTER, Kind.BUFFER)
_MEAN, _VARIANCE = "running_mean", "running_var"
"""The names that torch gives to the statistics of its batch and instance norms."""
_SPREADS = 4.0
"""How many times the deviation that own microbatches explain is allowed.

Of 12,960 drawn batch norms (2-8 ranks, 1-4 microbatches on each, momentum 0.01 to 1, buffers broadcast or not),
the worst came to 1.07.
"""


@dataclass(frozen=True)
class Comparer:
    """Compares a candidate with a reference, tensor by tensor, and judges by what rounding explains."""

    reference: Trace
    twins: ToleranceModel
    candidate: Trace

    @property
    def identity(self) -> str:
        """A text that differs whenever a comparison may differ."""
        return f"{self.twins.identity} {self.reference.identity} {self.candidate.identity}"

    def comparisons(self, ids: Sequence[TensorId]) -> list[Comparison]:
        """Compare ids one by one, and free the memory that reading them took."""
        comparisons = []
        for tensor_id in ids:
            comparisons.append(self.comparison(tensor_id))
            for trace in (self.reference, self.candidate):
                trace.release(tensor_id)
        return comparisons

    def comparison(self, tensor_id: TensorId) -> Comparison:
        """Compare one id."""
        if tensor_id.kind.is_recompute:
            return self._compare_recomputation(tensor_id)
        ours = self.reference.shards.get(tensor_id)
        theirs = self.candidate.shards.get(tensor_id)
        if ours and not theirs and not tensor_id.kind.is_of_param and self.candidate.is_opaque(tensor_id.name):
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.COMPILED))
        if ours and not theirs and tensor_id.kind in self.candidate.untraced:
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.UNTRACED_IN_CANDIDATE))
        if theirs and not ours and tensor_id.kind in self.reference.untraced:
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.UNTRACED_IN_REFERENCE))
        if theirs and self.reference.is_passed(tensor_id):
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.SKIPPED_BLOCK))
        if ours and not theirs and self._is_contribution_of_none(tensor_id):
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.NO_MICROBATCH_GRADIENTS))
        if not ours or not theirs:
            return Comparison(tensor_id, Verdict.MISSING, self._explain_missing(tensor_id))
        a = LogicalTensor.of(self.reference, tensor_id)
        is_by_rank = a is not None and a.by is not None and a.by.source is LayoutSource.RANKS
        if a is None or (is_by_rank and any(shard.record.region for shard in theirs)):
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.NO_REFERENCE_LAYOUT))
        if tensor_id not in self.twins.tolerances:
            return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.NO_TWIN))
        b = LogicalTensor.of(self.candidate, tensor_id, a.shape)
        if b is None:
            return Comparison(tensor_id, Verdict.UNJUDGED, _explain_no_layout(theirs, a))
        misfit = self._find_misfit(tensor_id, a, b)
        if misfit is not None:
            return Comparison(tensor_id, *misfit, layout=b.layout, by=b.by)
        return self._judge(tensor_id, a, b)

    def _find_misfit(
        self, tensor_id: TensorId, a: LogicalTensor, b: LogicalTensor
    ) -> tuple[Verdict, Why | None] | None:
        """Find out, without reading values, why the candidate's shards do not make up the reference's tensor."""
        for side, logical, trace in (("reference", a, self.reference), ("candidate", b, self.candidate)):
            flaw = _find_flaw(logical, _count_summands(tensor_id, logical, trace), side)
            if flaw is not None:
                return flaw
        if a.shape != b.shape:
            return Verdict.UNJUDGED, Why(Reason.OTHER_SHAPE, shapes=(a.shape, b.shape))
        absent = self._find_absent_ranks(tensor_id, b)
        if absent:
            return Verdict.MISSING, Why(Reason.ABSENT_ON_RANK, count=absent[0])
        return None

    def _compare_recomputation(self, tensor_id: TensorId) -> Comparison:
        """Compare a recomputation with the candidate's own first forward, rank by rank."""
        first_id = tensor_id.first
        first = {(s.coord.rank, s.record.microbatch): s for s in self.candidate.shards.get(first_id, ())}
        tolerance = self.twins.tolerances.get(first_id)
        total, parts = Stats(), []
        for again in self.candidate.shards[tensor_id]:
            before = first.get((again.coord.rank, again.record.microbatch))
            if before is None or tolerance is None or before.record.shape != again.record.shape:
                return Comparison(tensor_id, Verdict.MISSING, Why(Reason.NO_FIRST_FORWARD))
            found = measure_shards(before, again)
            parts.append(RegionError((again.coord.rank,), found.error))
            total = total + found
        verdict = Verdict.PASS if total.error <= tolerance.value else Verdict.FAIL  # type: ignore[union-attr]
        return Comparison(tensor_id, verdict, None, total, tolerance, tuple(parts), by=_FIRST_FORWARD)

    def _judge_decision(self, tensor_id: TensorId, a: LogicalTensor, b: LogicalTensor) -> tuple[Verdict, Why | None]:
        """Judge a choice that differs; it is correct if rounding may have changed the order of the scores."""
        reasons = tensor_id.at(Kind.DECISION, slot=make_scores_slot(tensor_id.site.slot))
        scores = LogicalTensor.of(self.reference, reasons)
        if scores is not None and reasons not in self.twins.tolerances:
            return Verdict.UNJUDGED, Why(Reason.NO_TWIN)
        if scores is None:  # these are scores themselves
            return Verdict.FAIL, None
        return judge_decision(a.tensor(), b.tensor(), scores.tensor(), self.twins.tolerances[reasons].value)

    def _explain_missing(self, tensor_id: TensorId) -> Why:
        sides = {"reference": self.reference, "candidate": self.candidate}
        clipping = [side for side, trace in sides.items() if tensor_id.at(Kind.CLIP) in trace.shards]
        if tensor_id.kind in (Kind.CLIP, Kind.GRAD_NORM) and len(clipping) == 1:
            return Why(Reason.ONE_SIDE_CLIPS, side=clipping[0])
        return Why(Reason.NO_TENSOR, side=next(side for side, trace in sides.items() if tensor_id not in trace.shards))

    def _is_contribution_of_none(self, tensor_id: TensorId) -> bool:
        """Whether this is a gradient of one microbatch, and the candidate has only the sum over microbatches."""
        if tensor_id.kind is not Kind.PARAM_GRAD or tensor_id.microbatch is None:
            return False
        final = tensor_id._replace(microbatch=None)
        return final in self.candidate.shards and tensor_id.name not in self._contributed

    @cached_property
    def _contributed(self) -> frozenset[str]:
        """The parameters for which the candidate has the gradient of any microbatch."""
        ids = self.candidate.shards
        return frozenset(t.name for t in ids if t.kind is Kind.PARAM_GRAD and t.microbatch is not None)

    def _find_absent_ranks(self, tensor_id: TensorId, b: LogicalTensor) -> list[int]:
        """Find ranks that own the module and ran this microbatch, but did not record this tensor."""
        is_kept_anywhere = tensor_id.kind is Kind.OPTIM or any(p.region.flat is not None for p in b.pieces)
        if tensor_id.name in self.candidate.divided or is_kept_anywhere:
            # Only the ends of a pipeline see the model's inputs; a sharded optimizer may keep its parts on any rank.
            return []
        present = {rank for piece in b.pieces for rank in piece.ranks}
        expected = self.candidate.owners(tensor_id.name)
        if tensor_id.microbatch is not None:
            expected = expected & self._ran[tensor_id.step, tensor_id.microbatch]
        return sorted(expected - present)

    @cached_property
    def _ran(self) -> dict[tuple[int, int], frozenset[int]]:
        """The ranks that recorded anything in a step's microbatch."""
        found: dict[tuple[int, int], set[int]] = {}
        for tensor_id, shards in self.candidate.shards.items():
            if tensor_id.microbatch is not None:
                ranks = found.setdefault((tensor_id.step, tensor_id.microbatch), set())
                # Tokens are dispatched to experts on ranks that do not run their microbatch.
                ranks.update(shard.coord.rank for shard in shards if shard.record.source is not LayoutSource.ROUTING)
        return {key: frozenset(ranks) for key, ranks in found.items()}

    def _is_of_some_microbatches(self, tensor_id: TensorId, b: LogicalTensor) -> bool:
        """Whether this is a buffer that forward passes change, on ranks that ran only some of its microbatches.

        If each rank has its own data, its batch norm has its own running mean, but the reference has seen all data.
        """
        if not tensor_id.kind.is_of_buffer or tensor_id.name not in self.reference.forward_buffers:
            return False
        if tensor_id.name in self.candidate.unloaded:
            return False
        last = tensor_id.step - (tensor_id.kind is Kind.BUFFER)
        ran = {(t.step, t.microbatch) for t in self.reference.shards if t.step <= last and t.microbatch is not None}
        ranks = {rank for piece in b.pieces for rank in piece.ranks}
        return any(not ranks <= self._ran.get((step, microbatch), frozenset()) for step, microbatch in ran)

    def _find_flaw_of_statistics(self, tensor_id: TensorId, tolerance: Tolerance) -> Why | None:
        """Find what own microbatches cannot explain in a buffer; None if they may explain all of it."""
        held = {shard.coord.rank: shard for shard in self.candidate.shards[tensor_id]}
        if not all(shard.record.has_values and shard.record.dtype.is_floating_point for shard in held.values()):
            return None
        if not all(bool(shard.tensor().isfinite().all()) for shard in held.values()):
            return Why(Reason.NOT_FINITE)
        name = tensor_id.name.rpartition(".")[2]
        least = {rank: float(shard.tensor().min()) for rank, shard in held.items() if shard.tensor().numel()}
        rank = min(least, key=least.__getitem__, default=None)
        if name == _VARIANCE and rank is not None and least[rank] < 0.0:
            return Why(Reason.NEGATIVE_VARIANCE, count=rank, value=least[rank])
        is_first = tensor_id.kind is Kind.BUFFER_AFTER and tensor_id.step == self.candidate.manifest.first_step
        return self._compare_changes(tensor_id, tolerance) if is_first and name in (_MEAN, _VARIANCE) else None

    def _compare_changes(self, tensor_id: TensorId, tolerance: Tolerance) -> Why | None:
        """Compare how the first step changed the ranks' statistics with how it changed the reference's."""
        sides = []
        for trace in (self.reference, self.candidate):
            after, before = ({s.coord.rank: s for s in trace.shards.get(tensor_id.at(k), ())} for k in _AROUND_STEP)
            if after.keys() != before.keys() or not all(
                s.record.has_values for s in (*after.values(), *before.values())
            ):
                return None
            sides.append({rank: (before[rank].tensor().double(), after[rank].tensor().double()) for rank in after})
        (start, end), theirs = next(iter(sides[0].values())), sides[1]
        if (
            len(theirs) < 2
            or end.numel() < TINY
            or not all(torch.equal(start, before) for before, _ in theirs.values())
        ):
            return None
        ran = [ranks for (step, _), ranks in self._ran.items() if step == tensor_id.step]
        num_own = min(sum(rank in ranks for ranks in ran) for rank in theirs)
        changes = torch.stack([after - before for before, after in theirs.values()])
        off, explained = measure_changes(end - start, changes, num_own, len(ran))
        size = max(float((end - start).norm()), LEAST_DIVISOR)
        allowed = _SPREADS * explained + tolerance.value * float(end.norm())
        return Why(Reason.OTHER_STATISTICS, value=off / size, limit=allowed / size) if off > allowed else None

    def _judge(self, tensor_id: TensorId, a: LogicalTensor, b: LogicalTensor) -> Comparison:
        tolerance, left_out = self.twins.tolerances[tensor_id], None
        factor = factor_to_come(tensor_id, self.reference, self.candidate)
        total, parts = measure(a, b, factor=factor)
        if (
            tolerance.error(total) > tolerance.value / self.twins.margin
        ):  # only then, because finding noise-dominated elements reads all gradients
            left_out = self.twins.find_noise_dominated(tensor_id)
            total, parts = measure(a, b, factor=factor, left_out=left_out) if left_out else (total, parts)
        replica_error, allowed = self._find_worst_replicas(tensor_id, b, tolerance)
        verdict, why = _decide_verdict(tensor_id, total, (replica_error, allowed), tolerance)
        if verdict is Verdict.FAIL and tensor_id.kind is Kind.DECISION:
            verdict, why = self._judge_decision(tensor_id, a, b)
        if verdict.is_wrong and self._is_of_some_microbatches(tensor_id, b):
            flaw = self._find_flaw_of_statistics(tensor_id, tolerance)
            if flaw is None:
                return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.OWN_MICROBATCHES), layout=b.layout, by=b.by)
            verdict, why = Verdict.FAIL, flaw
        if verdict is Verdict.PASS and left_out is not None and left_out.is_everything():
            verdict = Verdict.UNJUDGED
            why = Why(Reason.NOISE_DOMINATED_UPDATE if tolerance.is_proven_zero else Reason.UNPROVEN_UPDATE)
        comparison = Comparison(
            tensor_id,
            verdict,
            why,
            total,
            tolerance,
            tuple(RegionError(piece.ranks, tolerance.error(part)) for piece, part in parts),
            replica_error,
            allowed,
            b.layout,
            b.by,
            num_different=self._count_different(a, b) if verdict.is_wrong and _is_of_integers(a) else None,
        )
        return judge_scale(judge_own_rows(comparison, a, b, self.candidate))

    def _find_worst_replicas(self, tensor_id: TensorId, b: LogicalTensor, tolerance: Tolerance) -> tuple[float, float]:
        """Find the error and the limit of the replicas that differ most; any that exceed their limit come first."""
        found = []
        for x, y, is_reduced in self._replica_pairs(b):
            allowed = replica_tolerance(tensor_id, tolerance, x.record.dtype, is_reduced=is_reduced)
            found.append((tolerance.error(measure_shards(x, y)), allowed))
        return max(found, key=lambda pair: (pair[0] > pair[1], pair[0]), default=(0.0, tolerance.value))

    def _replica_pairs(self, b: LogicalTensor) -> Iterator[tuple[Shard, Shard, bool]]:
        mesh, reduced = self.candidate.mesh, self.candidate.reduced
        return (pair for piece in b.pieces for pair in piece.replica_pairs(mesh, reduced))

    def _count_different(self, a: LogicalTensor, b: LogicalTensor) -> int:
        """Count the elements that differ from the reference or, if there are none, between replicas."""
        ours, theirs = Values(a), Values(b)
        count = sum(int((ours.read(bounds) != theirs.read(bounds)).sum()) for bounds in ours.cut())
        return count or sum(int((x.tensor() != y.tensor()).sum()) for x, y, _ in self._replica_pairs(b))


def _count_summands(tensor_id: TensorId, logical: LogicalTensor, trace: Trace) -> int:
    """Count the summands of a pending sum. A tied weight is on some stages of a pipeline only."""
    if not logical.pending:
        return min(len(trace.owners(tensor_id.name)), 1) if tensor_id.kind.is_of_param else 1
    if not tensor_id.kind.is_of_param:
        return math.prod(trace.sizes.get(axis, 1) for axis in logical.pending)
    owners = (trace.mesh.coord(rank) for rank in trace.owners(tensor_id.name))
    return len({tuple(coord.get(axis, 0) for axis in logical.pending) for coord in owners})


def _find_flaw(logical: LogicalTensor, num_summands: int, side: str) -> tuple[Verdict, Why | None] | None:
    """Find out why shards do not make up a tensor."""
    first = logical.pieces[0]
    if len(logical.pieces) == num_summands == len(first.summands) == 1 and first.region.is_whole:
        return None  # a shortcut for most tensors
    if len(shapes := logical.shapes()) > 1:
        return Verdict.UNJUDGED, Why(Reason.DIFFERENT_SHAPES, side, shapes=tuple(sorted(shapes)))
    cover = logical.coverage()
    if cover.num_gap:
        return Verdict.GAP, Why(Reason.GAP, side, count=cover.num_gap, index=cover.first_gap or ())
    if cover.num_overlap:
        return Verdict.UNJUDGED, Why(Reason.OVERLAP, side, count=cover.num_overlap)
    if any(len(piece.summands) != num_summands for piece in logical.pieces):
        return Verdict.GAP, Why(Reason.MISSING_SUMMAND, side, names=logical.pending)
    return None


def _decide_verdict(
    tensor_id: TensorId, total: Stats, replicas: tuple[float, float], tolerance: Tolerance
) -> tuple[Verdict, Why | None]:
    """Decide by the error and by `replicas`: the difference between replicas, and its limit."""
    if _is_erratic(total, tolerance):
        return Verdict.UNJUDGED, Why(Reason.REFERENCE_NOT_FINITE)
    if not total.finite_b:
        return Verdict.FAIL, Why(Reason.NOT_FINITE)
    if is_zero((tolerance.twin_error,)):
        # A gradient may be zero but for rounding. An activation that twins cannot repeat shows an unstable reference.
        is_forward = not (tensor_id.kind.is_backward or tensor_id.kind.is_of_param)
        gradient = Reason.ZERO if tolerance.is_proven_zero else Reason.UNPROVEN_ZERO
        return Verdict.UNJUDGED, Why(Reason.UNSTABLE if is_forward else gradient)
    is_off = tolerance.error(total) > tolerance.value
    # Replicas that are all wrong, and nearly the same, are a failure rather than a conflict.
    if replicas[0] > (max(replicas[1], tolerance.value) if is_off else replicas[1]):
        return Verdict.CONFLICT, Why(Reason.REPLICAS_DIFFER, value=replicas[0])
    if not is_off and tolerance.systematic:
        return Verdict.UNJUDGED, Why(Reason.BEHIND_NOISE, value=tolerance.systematic, limit=tolerance.without_noise)
    return (Verdict.FAIL if is_off else Verdict.PASS), None


def _is_erratic(total: Stats, tolerance: Tolerance) -> bool:
    """Whether the reference is not finite, except for infinities that its twins have in the same place."""
    is_nonzero = total.aa > 0.0 or total.inf_a > 0
    return total.nan_a > 0 or (math.isinf(tolerance.twin_error) and is_nonzero)


def _is_of_integers(logical: LogicalTensor) -> bool:
    return not logical.dtype.is_floating_point and not logical.num_buckets


def _explain_no_layout(shards: list[Shard], a: LogicalTensor) -> Why:
    held = sorted({shard.record.shape for shard in shards})
    return Why(Reason.NO_LAYOUT, shapes=(a.shape, *held))


def judge_decision(
    ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor, tolerance: float
) -> tuple[Verdict, Why | None]:
    """Judge two choices along the last dim of the reference's scores, whose relative error may be `tolerance`.

    Choices are sets, because the order of equal scores has no meaning. The score that a different choice gives away,
    measured by the reference's own scores, must be within the rounding error of the scores on both sides of the tie.
    """
    if ours.ndim < scores.ndim:  # an argmax
        ours, theirs = ours[..., None], theirs[..., None]
    differs = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
    if not bool(differs.any()):
        return Verdict.PASS, None
    exact = scores.to(torch.float64)
    given_away = (exact.gather(-1, ours).sum(-1) - exact.gather(-1, theirs).sum(-1)).abs()[differs]
    finite = exact[exact.isfinite()]
    allowed = 2 * tolerance * float(finite.square().mean().sqrt()) * ours.shape[-1]
    count, total = int(differs.sum()), differs.numel()
    worst = float(given_away.max())
    if worst <= allowed:
        return Verdict.PASS, Why(Reason.CHOICES_TIED, count=count, total=total)
    return Verdict.FAIL, Why(Reason.CHOICES_DIFFER, count=count, total=total, value=worst, limit=allowed)


def measure_changes(
    change: torch.Tensor, changes: torch.Tensor, num_own: int, num_microbatches: int
) -> tuple[float, float]:
    """Measure how far the mean of the ranks' `changes` of a statistic is from the reference's, and what explains it.

    Each forward pass moves a statistic by a fixed part of the way to that of its batch. The reference runs more of
    them, so the mean over the ranks moves by a factor less: a factor between the share of microbatches that a rank
    runs and 1. The rest is due to how much batches differ. By the inequality of Cauchy and Schwarz, it is at most the
    spread between the ranks times the root of the number of microbatches, if each rank runs one.
    """
    mean = changes.mean(0)
    factor = float(mean.flatten() @ change.flatten()) / max(float(change.square().sum()), LEAST_DIVISOR)
    off = float((mean - min(max(factor, num_own / num_microbatches), 1.0) * change).norm())
    spread = float((changes - mean).norm()) / math.sqrt(len(changes) - 1)
    return off, math.sqrt(num_microbatches) * spread


def judge_own_rows(comparison: Comparison, a: LogicalTensor, b: LogicalTensor, candidate: Trace) -> Comparison:
    """Judge replicas that differ along the axes of the batch again, as values of each rank's own rows.

    An example is a model's mean loss. Such a value has no dim along which the batch is cut, so the ranks seem to hold
    replicas, and the replicas differ. It is correct if their average or their sum over the data axes equals the
    reference.
    """
    tolerance, axes = comparison.tolerance, candidate.batch_axes
    is_meant = comparison.verdict is Verdict.CONFLICT and comparison.id.kind in _FORWARD and b.by == INFERRED
    if not is_meant or tolerance is None or not axes or b.pending:
        return comparison
    pieces = [_group_by_rows(piece, axes, tolerance) for piece in b.pieces]
    num_parts = math.prod(candidate.mesh.sizes[axis] for axis in axes)
    if any(piece is None or len(piece.summands) != num_parts for piece in pieces):
        return comparison
    grouped = replace(b, pieces=tuple(piece for piece in pieces if piece is not None), pending=axes)
    for factor, word in ((1 / num_parts, "average"), (1.0, "sum")):
        total, parts = measure(a, grouped, factor=factor)
        if tolerance.error(total) <= tolerance.value:
            return replace(
                comparison,
                verdict=Verdict.PASS,
                why=None,
                stats=total,
                region_errors=tuple(RegionError(piece.ranks, tolerance.error(part)) for piece, part in parts),
                replica_error=0.0,
                layout=f"{word} over {', '.join(axes)}",
            )
    # If some ranks equal the reference, all of them should: then the value is not computed from own rows.
    errors = [tolerance.error(measure(a, part)[0]) for part in _split_summands(grouped)]
    is_own = all(error > tolerance.value for error in errors)
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.OWN_ROWS)) if is_own else comparison


def _group_by_rows(piece: Piece, axes: Sequence[str], tolerance: Tolerance) -> Piece | None:
    """Treat replicas as one summand for each part of the batch; None if replicas with the same rows differ."""
    groups: dict[tuple[int, ...], list[Shard]] = {}
    for shard in piece.summands[0]:
        groups.setdefault(tuple(shard.coord[axis] for axis in axes), []).append(shard)
    for first, *others in groups.values():
        if any(tolerance.error(measure_shards(first, other)) > tolerance.value for other in others):
            return None
    return replace(piece, summands=tuple(tuple(group) for _, group in sorted(groups.items())))


def _split_summands(grouped: LogicalTensor) -> list[LogicalTensor]:
    num_parts = len(grouped.pieces[0].summands)
    return [
        replace(grouped, pieces=tuple(Piece(piece.region, (piece.summands[i],)) for piece in grouped.pieces))
        for i in range(num_parts)
    ]
