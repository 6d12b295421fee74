"""This module names the likely cause of a wrong tensor, from evidence in the data.

Each test is a function from the evidence to a cause or None; the first that speaks wins, so they stand from the most
specific to the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ttrace.judge.factor import factor_to_come
from ttrace.judge.logical import Logical, Piece, compared, measured
from ttrace.judge.tolerance import replica_tolerance
from ttrace.judge.verdict import Cause, Comparison, Verdict
from ttrace.tensors.mesh import Mesh
from ttrace.trace.reader import Shard, Trace
from ttrace.values.stats import Stats

_NEAR = 2.0
"""An explanation leaves an error of at most so many tolerances,"""
_FAR = 0.1
"""and at most this part of the error that it explains."""


MISSING_ALL_REDUCE = "missing all-reduce"


@dataclass(frozen=True)
class Evidence:
    """A wrong comparison with both sides' shards at hand."""

    comparison: Comparison
    reference: Logical
    candidate: Logical
    mesh: Mesh
    sizes: Mapping[str, int]
    factor: float
    """What the candidate's reduction still applies."""

    @property
    def tolerance(self) -> float:
        return self.comparison.tolerance.value if self.comparison.tolerance else 0.0

    @property
    def replica_tolerance(self) -> float:
        tolerance = self.comparison.tolerance
        return replica_tolerance(self.comparison.id.kind, tolerance) if tolerance else 0.0

    @property
    def stats(self) -> Stats:
        return self.comparison.stats

    def error_of(self, candidate: Logical, factor: float = 1.0) -> float:
        return measured(self.reference, candidate, factor=self.factor * factor)[0].error

    def is_explained(self, rest: float) -> bool:
        """Whether so little is left of a conflict that the explanation holds."""
        return rest <= min(_NEAR * self.tolerance, _FAR * self.comparison.replica_error)


def cause(comparison: Comparison, reference: Trace, candidate: Trace) -> Cause:
    """Why this tensor probably is wrong."""
    if comparison.id.kind.is_recompute:
        return Cause("recompute", "recomputation gives other values than the first forward did")
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
    if a is None or b is None:
        return None
    factor = factor_to_come(comparison.id, reference, candidate)
    return Evidence(comparison, a, b, candidate.mesh, candidate.sizes, factor)


def _not_finite(e: Evidence) -> Cause | None:
    if e.stats.finite_b or not e.stats.finite_a:
        return None
    return Cause(
        "not finite",
        "the candidate is not finite where the reference is",
        evidence=(f"{e.stats.nan_b} NaN and {e.stats.inf_b} infinite elements",),
    )


def _zeros(e: Evidence) -> Cause | None:
    # Of replicas that differ only the first was measured.
    if e.stats.bb != 0.0 or e.stats.aa == 0.0 or e.comparison.verdict is not Verdict.FAIL:
        return None
    return Cause("zeros", "the candidate is zero everywhere")


def _missing_all_reduce(e: Evidence) -> Cause | None:
    """Replicas along an axis differ, and their sum is the reference."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in _axes_of_conflict(e):
        error = e.error_of(_summed_over(e, axis))
        if e.is_explained(error):
            return Cause(
                MISSING_ALL_REDUCE,
                f"replicas differ and sum to the reference: missing all-reduce over {axis}",
                axis,
                (
                    f"replicas differ by {e.comparison.replica_error:.1e}",
                    f"their sum over {axis}={e.sizes[axis]} is the reference to {error:.1e}",
                ),
            )
    return None


def _missing_average(e: Evidence) -> Cause | None:
    """Replicas along an axis differ, and their mean is the reference."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in _axes_of_conflict(e):
        error = e.error_of(_summed_over(e, axis), 1 / e.sizes[axis])
        if e.is_explained(error):
            return Cause(
                "missing average",
                f"replicas differ and average to the reference: missing gradient averaging over {axis}",
                axis,
                (f"their mean over {axis}={e.sizes[axis]} is the reference to {error:.1e}",),
            )
    return None


def _missing_all_reduce_before_bias(e: Evidence) -> Cause | None:
    """Replicas sum to the reference, but for a row that each of them added: a bias, added before summing."""
    if e.comparison.verdict is not Verdict.CONFLICT or len(e.reference.shape) < 2 or len(e.reference.pieces) != 1:
        return None
    reference = e.reference.pieces[0].tensor().to(torch.float64)
    for axis in _axes_of_conflict(e):
        summed = _summed_over(e, axis)
        if len(summed.pieces) != 1 or summed.pieces[0].region != e.reference.pieces[0].region:
            continue
        surplus = (summed.pieces[0].tensor() - reference).flatten(0, -2)
        rest = float((surplus - surplus.mean(0)).norm() / reference.norm())
        if e.is_explained(rest):
            return Cause(
                MISSING_ALL_REDUCE,
                f"replicas differ and sum to the reference plus a bias of each: missing all-reduce over {axis}",
                axis,
                (f"but for one row, their sum over {axis}={e.sizes[axis]} is the reference to {rest:.1e}",),
            )
    return None


def _constant_factor(e: Evidence) -> Cause | None:
    """The candidate is the reference times one number."""
    s = e.stats
    if s.aa == 0.0 or not math.isfinite(s.scale) or e.comparison.verdict is not Verdict.FAIL:
        return None
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if rest > min(_NEAR * e.tolerance * max(abs(s.scale), 1.0), _FAR * abs(s.scale), _FAR * s.error):
        return None
    axes, words = _explained(s.scale, _sizes_around(e))
    if not axes:
        axes, words = _explained(s.scale, e.sizes)
    if s.count == 1 and not axes:
        return None  # one number is always a multiple of another
    return Cause(
        "constant factor",
        f"the candidate is {s.scale:.4g} x the reference{words}",
        axes[0] if len(axes) == 1 else None,
        (f"without that factor the error is {rest:.1e}",),
    )


def _some_ranks(e: Evidence) -> Cause | None:
    """Some shards are right and others are not."""
    if e.comparison.verdict is not Verdict.FAIL:
        return None
    wrong = [part for part in e.comparison.parts if part.error > e.tolerance]
    right = [part for part in e.comparison.parts if part.error <= e.tolerance]
    # Just above and just below the tolerance are much the same.
    if not wrong or not right or max(p.error for p in right) > _FAR * min(p.error for p in wrong):
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
        axes[0] if len(axes) == 1 else None,
        (f"replicas differ by {e.comparison.replica_error:.1e}", *_wrong_replicas(e)),
    )


def _wrong_replicas(e: Evidence) -> list[str]:
    """Which replicas are off, where some are right: nothing of the kind can be said of summands."""
    shards = [(piece, shard) for piece in e.candidate.pieces for shard in piece.summands[0]]
    if e.candidate.pending:
        return []
    errors = {
        shard.coord.rank: e.error_of(replace(e.candidate, pieces=(Piece(piece.region, ((shard,),)),)))
        for piece, shard in shards
    }
    wrong = [f"rank {rank}: error {error:.1e}" for rank, error in errors.items() if error > e.tolerance]
    return wrong[:4] if len(wrong) < len(errors) else []


_TESTS = (
    _not_finite,
    _zeros,
    _missing_all_reduce,
    _missing_average,
    _missing_all_reduce_before_bias,
    _constant_factor,
    _some_ranks,
    _replicas_differ,
)


def _axes_of_conflict(e: Evidence) -> list[str]:
    """Axes along which replicas that sit alike on every other axis differ."""
    return [axis for axis, size in e.mesh.sizes.items() if size > 1 and _differs_along(e, axis)]


def _differs_along(e: Evidence, axis: str) -> bool:
    for piece in e.candidate.pieces:
        for group in _groups(e, piece, axis):
            first = group[0].tensor()
            if any(compared(first, other.tensor()).error > e.replica_tolerance for other in group[1:]):
                return True
    return False


def _groups(e: Evidence, piece: Piece, axis: str) -> Iterator[list[Shard]]:
    """Replicas that differ in their place on this axis alone, within the first factorisation that has it."""
    axes = next([name for name, _ in part] for part in e.mesh.factorisations if axis in dict(part))
    for replicas in piece.summands:
        groups: dict[tuple[int, ...], list[Shard]] = {}
        for shard in replicas:
            rest = tuple(shard.coord[name] for name in axes if name != axis)
            groups.setdefault((shard.record.microbatch, *rest), []).append(shard)
        yield from (group for group in groups.values() if len(group) > 1)


def _summed_over(e: Evidence, axis: str) -> Logical:
    """The same shards, with the replicas along an axis read as summands."""
    pieces = []
    for piece in e.candidate.pieces:
        group = next(_groups(e, piece, axis), list(piece.summands[0]))
        pieces.append(Piece(piece.region, tuple((shard,) for shard in group)))
    return replace(e.candidate, pieces=tuple(pieces), pending=(*e.candidate.pending, axis))


def _sizes_around(e: Evidence) -> dict[str, int]:
    """The axes that are the first to suspect: those of the factorisations that the tensor's layout belongs to."""
    words = [word.partition(":")[0] for text in e.candidate.layout.split() for word in text.split("/")[1:]]
    named = (set(words) | set(e.candidate.pending)) & set(e.mesh.sizes)
    parts = [part for part in e.mesh.factorisations if named <= {axis for axis, _ in part}]
    around = {axis for part in parts for axis, _ in part} or set(e.sizes)
    return {axis: size for axis, size in e.sizes.items() if axis in around or axis not in e.mesh.sizes}


def _explained(scale: float, sizes: Mapping[str, int]) -> tuple[list[str], str]:
    """The axes whose size is this factor, or its inverse, in words: all of them, as none can be told from another."""
    for factor, over, end in ((scale, "", ", as if summed once too often"), (1 / scale, "1/", "")):
        axes = [axis for axis, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=0.01)]
        if axes:
            named = " or ".join(f"{over}{axis}" for axis in axes)
            return axes, f": scaled by {named} ({', '.join(f'{axis}={sizes[axis]}' for axis in axes)}){end}"
    return [], ""
