"""Verdicts on values that each data-parallel rank computes from its own rows, such as a model's mean loss.

Such a value has no dim that the batch is cut along, so its shape says nothing: the ranks seem to hold replicas, and the
replicas differ. It is right if their average or their sum over the data axes is the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ttrace.judge.reason import Reason, Why
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure, measure_shards
from ttrace.judge.verdict import Comparison, RegionError, Tolerance, Verdict
from ttrace.layouts.ids import Kind
from ttrace.layouts.source import INFERRED
from ttrace.trace.reader import Shard, Trace

_FORWARD = (Kind.INPUT, Kind.OUTPUT, Kind.CALL)


def judge_own_rows(comparison: Comparison, a: LogicalTensor, b: LogicalTensor, candidate: Trace) -> Comparison:
    """Judge replicas that differ along the axes of the batch again, as values of each rank's own rows."""
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
    # Where some ranks are right, all of them should be: that is no value of own rows.
    errors = [tolerance.error(measure(a, part)[0]) for part in _split_summands(grouped)]
    is_own = all(error > tolerance.value for error in errors)
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.OWN_ROWS)) if is_own else comparison


def _group_by_rows(piece: Piece, axes: Sequence[str], tolerance: Tolerance) -> Piece | None:
    """Read replicas as one summand for each part of the batch; None where replicas with the same rows differ."""
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
