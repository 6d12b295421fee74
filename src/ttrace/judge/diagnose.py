"""This module names the likely cause of a wrong tensor, from evidence in the data.

Each test is a function from the evidence to a cause or None; the first that speaks wins, so they stand from the most
specific to the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ttrace.judge.logical import Logical, Piece, measured
from ttrace.judge.verdict import Cause, Comparison, Verdict
from ttrace.trace.reader import Shard, Trace
from ttrace.values.stats import Stats, stats


@dataclass(frozen=True)
class Evidence:
    """A wrong comparison with both sides' shards at hand."""

    comparison: Comparison
    reference: Logical
    candidate: Logical
    sizes: Mapping[str, int]

    @property
    def tolerance(self) -> float:
        return self.comparison.tolerance.value if self.comparison.tolerance else 0.0

    @property
    def stats(self) -> Stats:
        return self.comparison.stats


def cause(comparison: Comparison, reference: Trace, candidate: Trace) -> Cause:
    """Why this tensor probably is wrong."""
    evidence = _evidence(comparison, reference, candidate)
    if evidence is not None:
        for test in _TESTS:
            found = test(evidence)
            if found is not None:
                return found
    return Cause("unexplained", "no known pattern explains the difference")


def _evidence(comparison: Comparison, reference: Trace, candidate: Trace) -> Evidence | None:
    a = Logical.found(reference, comparison.id)
    b = Logical.found(candidate, comparison.id, a.shape if a else None)
    return Evidence(comparison, a, b, candidate.sizes) if a and b else None


def _not_finite(e: Evidence) -> Cause | None:
    if e.stats.finite_b or not e.stats.finite_a:
        return None
    return Cause(
        "not finite",
        "the candidate is not finite where the reference is",
        evidence=(f"{e.stats.nan_b} NaN and {e.stats.inf_b} infinite elements",),
    )


def _zeros(e: Evidence) -> Cause | None:
    if e.stats.bb != 0.0 or e.stats.aa == 0.0:
        return None
    return Cause("zeros", "the candidate is zero everywhere")


def _missing_all_reduce(e: Evidence) -> Cause | None:
    """Replicas along an axis differ, and their sum is the reference."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in _axes_of_conflict(e):
        error = measured(e.reference, _summed_over(e.candidate, axis))[0].error
        if error <= 10 * e.tolerance:
            return Cause(
                "missing all-reduce",
                f"replicas differ and sum to the reference: missing all-reduce over {axis}",
                axis,
                (
                    f"replicas differ by {e.comparison.replica_error:.1e}",
                    f"their sum over {axis}={e.sizes[axis]} is the reference to {error:.1e}",
                ),
            )
    return None


def _constant_factor(e: Evidence) -> Cause | None:
    """The candidate is the reference times one number."""
    s = e.stats
    if s.aa == 0.0 or not math.isfinite(s.scale) or e.comparison.verdict is not Verdict.FAIL:
        return None
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if rest > 2 * e.tolerance * max(abs(s.scale), 1.0) or abs(s.scale - 1.0) <= e.tolerance:
        return None
    axis, words = _explained(s.scale, e.sizes)
    return Cause(
        "constant factor",
        f"the candidate is {s.scale:.4g} x the reference{words}",
        axis,
        (f"without that factor the error is {rest:.1e}",),
    )


def _some_ranks(e: Evidence) -> Cause | None:
    """Some shards are right and others are not."""
    wrong = [part for part in e.comparison.parts if part.error > e.tolerance]
    if not wrong or len(wrong) == len(e.comparison.parts):
        return None
    ranks = sorted({rank for part in wrong for rank in part.ranks})
    return Cause(
        "some ranks",
        f"only the shards of rank {', '.join(map(str, ranks))} are wrong",
        evidence=tuple(f"rank {', '.join(map(str, part.ranks))}: error {part.error:.1e}" for part in wrong[:4]),
    )


def _replicas_differ(e: Evidence) -> Cause | None:
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    axes = _axes_of_conflict(e)
    return Cause(
        "replicas differ",
        f"replicas that must agree differ along {', '.join(axes) or 'no single axis'}",
        axes[0] if axes else None,
        (f"replicas differ by {e.comparison.replica_error:.1e}",),
    )


_TESTS = (_not_finite, _zeros, _missing_all_reduce, _constant_factor, _some_ranks, _replicas_differ)


def _axes_of_conflict(e: Evidence) -> list[str]:
    """Axes along which replicas that sit alike on every other axis differ."""
    return [axis for axis, size in e.sizes.items() if size > 1 and _differs_along(e, axis)]


def _differs_along(e: Evidence, axis: str) -> bool:
    for piece in e.candidate.pieces:
        for group in _groups(piece, axis):
            first = group[0].tensor()
            if any(stats(first, other.tensor()).error > e.tolerance for other in group[1:]):
                return True
    return False


def _groups(piece: Piece, axis: str) -> Iterator[list[Shard]]:
    """Replicas that differ in their place on this axis alone."""
    for replicas in piece.summands:
        groups: dict[tuple[tuple[str, int], ...], list[Shard]] = {}
        for shard in replicas:
            if axis in shard.coord:
                rest = tuple(item for item in shard.coord.items() if item[0] != axis)
                groups.setdefault(rest, []).append(shard)
        yield from (group for group in groups.values() if len(group) > 1)


def _summed_over(logical: Logical, axis: str) -> Logical:
    """The same shards, with the replicas along an axis read as summands."""
    pieces = []
    for piece in logical.pieces:
        group = next(_groups(piece, axis), list(piece.summands[0]))
        pieces.append(Piece(piece.region, tuple((shard,) for shard in group)))
    return replace(logical, pieces=tuple(pieces), pending=(*logical.pending, axis))


def _explained(scale: float, sizes: Mapping[str, int]) -> tuple[str | None, str]:
    for axis, size in sizes.items():
        if size > 1 and math.isclose(scale, size, rel_tol=0.01):
            return axis, f": multiplied by {axis}={size}, as if summed once too often over {axis}"
        if size > 1 and math.isclose(scale, 1 / size, rel_tol=0.01):
            return axis, f": divided by {axis}={size}"
    return None, ""
