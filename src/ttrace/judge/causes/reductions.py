"""This module names the likely cause of a wrong tensor, from evidence in the data.

Each test is a function from the evidence to a cause or None; the first that speaks wins, so they stand from the most
specific to the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from ttrace.errors import SketchError
from ttrace.judge.causes import integers, operands, optimizer, values
from ttrace.judge.causes.batch_statistics import find_own_statistics
from ttrace.judge.causes.evidence import FAR, NEAR, Evidence
from ttrace.judge.causes.not_finite import not_finite
from ttrace.judge.causes.uneven_weights import uneven_weights
from ttrace.judge.tensors.logical import Logical, Piece, compared
from ttrace.judge.tensors.rank_names import name_ranks
from ttrace.judge.verdict import Cause, CauseName, Comparison, Verdict
from ttrace.tensors.ids import Kind
from ttrace.tensors.mesh import MICROBATCH_AXIS
from ttrace.trace.reader import Shard, Trace

_TOO_OFTEN = ", as if summed once too often"
_NAMED = {MICROBATCH_AXIS: "the number of microbatches"}


def cause(comparison: Comparison, reference: Trace, candidate: Trace) -> Cause:
    """Why this tensor probably is wrong."""
    if comparison.id.kind.is_recompute:
        return Cause(CauseName.RECOMPUTE, "recomputation gives other values than the first forward did")
    evidence = Evidence.of(comparison, reference, candidate)
    if evidence is not None:
        for test in _TESTS:
            with suppress(SketchError):  # what needs values says nothing of sketches
                found = test(evidence)
                if found is not None:
                    return found
    return Cause(CauseName.UNEXPLAINED, "no known pattern explains the difference")


def _zeros(e: Evidence) -> Cause | None:
    # Of replicas that differ only the first was measured.
    if e.stats.bb != 0.0 or e.stats.aa == 0.0 or e.comparison.verdict is not Verdict.FAIL:
        return None
    return Cause(CauseName.ZEROS, "the candidate is zero everywhere")


def _missing_all_reduce(e: Evidence) -> Cause | None:
    """Replicas along an axis differ, and their sum is the reference."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in axes_of_conflict(e):
        error = e.error_of(_summed_over(e, axis))
        if e.is_explained(error):
            return Cause(
                CauseName.MISSING_ALL_REDUCE,
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
    for axis in axes_of_conflict(e):
        if not e.comparison.id.kind.is_of_param and _has_equal(e, axis):
            continue  # only gradients of parameters are averaged: more likely the other axis was summed over
        error = e.error_of(_summed_over(e, axis), 1 / e.sizes[axis])
        if e.is_explained(error):
            return Cause(
                CauseName.MISSING_AVERAGE,
                f"replicas differ and average to the reference: missing gradient averaging over {axis}",
                axis,
                (f"their mean over {axis}={e.sizes[axis]} is the reference to {error:.1e}",),
            )
    return None


def _has_equal(e: Evidence, axis: str) -> bool:
    return any(size == e.sizes[axis] for other, size in e.mesh.sizes.items() if other != axis)


def _wrong_group(e: Evidence) -> Cause | None:
    """Replicas along one axis differ, and their sum is the reference times the size of another."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in axes_of_conflict(e):
        summed = _summed_over(e, axis)
        for other, size in e.mesh.sizes.items():
            error = e.error_of(summed, 1 / size) if other != axis and size > 1 else math.inf
            if e.is_explained(error):
                return Cause(
                    CauseName.WRONG_GROUP,
                    f"summed over {other} instead of {axis}",
                    axis,
                    (f"the sum over {axis}={e.sizes[axis]} is {size} x the reference to {error:.1e}",),
                )
    return None


def _missing_all_reduce_before_bias(e: Evidence) -> Cause | None:
    """Replicas sum to the reference, but for a row that each of them added: a bias, added before summing."""
    if e.comparison.verdict is not Verdict.CONFLICT or len(e.reference.shape) < 2 or len(e.reference.pieces) != 1:
        return None
    reference = e.reference.pieces[0].tensor().to(torch.float64)
    for axis in axes_of_conflict(e):
        summed = _summed_over(e, axis)
        if len(summed.pieces) != 1 or summed.pieces[0].region != e.reference.pieces[0].region:
            continue
        surplus = (summed.pieces[0].tensor() - reference).flatten(0, -2)
        rest = float((surplus - surplus.mean(0)).norm() / reference.norm())
        if e.is_explained(rest):
            return Cause(
                CauseName.MISSING_ALL_REDUCE,
                f"replicas differ and sum to the reference plus a bias of each: missing all-reduce over {axis}",
                axis,
                (f"but for one row, their sum over {axis}={e.sizes[axis]} is the reference to {rest:.1e}",),
            )
    return None


def _gradient_norm(e: Evidence) -> Cause | None:
    """A wrong norm of right gradients: shared gradients counted several times, or shards left out."""
    kind, ratio = e.comparison.id.kind, e.stats.scale
    if kind not in (Kind.GRAD_NORM, Kind.CLIP) or not math.isfinite(ratio) or ratio <= 0.0:
        return None
    if kind is Kind.CLIP and e.comparison.id.at(Kind.GRAD_NORM) in e.reference_trace.shards:
        words = f"gradients and their norm are right, but the clip factor is {ratio:.4g} x the reference's"
        return Cause(CauseName.CLIP_FACTOR, words)
    axis = _axis_left_out(e)
    if axis is not None:
        words = f"the gradients are right, but each rank has the norm of its own: not combined over {axis}"
        return Cause(CauseName.GRADIENT_NORM, words, axis, (f"their squares over {axis} sum to the reference's",))
    square = ratio**2 if kind is Kind.GRAD_NORM else ratio**-2
    axes, words = _explained(square, e.sizes)
    return Cause(
        CauseName.GRADIENT_NORM,
        f"the gradients are right, but their norm is {ratio if kind is Kind.GRAD_NORM else 1 / ratio:.4g} x the "
        f"reference's{f'; its square is{words[1:]}' if words else ''}",
        axes[0] if len(axes) == 1 else None,
    )


def _axis_left_out(e: Evidence) -> str | None:
    """The axis over whose ranks the squares of a norm sum to the reference's square."""
    if e.comparison.id.kind is not Kind.GRAD_NORM or e.comparison.verdict is not Verdict.CONFLICT:
        return None
    whole = float(e.reference.tensor())
    for axis in axes_of_conflict(e):
        shares = [float(replicas[0].tensor()) for replicas in _summed_over(e, axis).pieces[0].summands]
        if math.isclose(math.hypot(*shares), whole, rel_tol=max(NEAR * e.tolerance, 1e-12)):
            return axis
    return None


def _constant_factor(e: Evidence) -> Cause | None:
    """The candidate is the reference times one number."""
    s = e.stats
    if s.aa == 0.0 or not math.isfinite(s.scale) or e.comparison.verdict is not Verdict.FAIL:
        return None
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if rest > min(NEAR * e.tolerance * max(abs(s.scale), 1.0), FAR * abs(s.scale), FAR * s.error):
        return None
    axes, words = _explained_here(e, s.scale)
    if s.count == 1 and not axes:
        return None  # one number is always a multiple of another
    is_summed_twice = s.scale > 1.0 and bool(axes) and MICROBATCH_AXIS not in axes
    return Cause(
        CauseName.DOUBLE_REDUCTION if is_summed_twice else CauseName.CONSTANT_FACTOR,
        f"the candidate is {s.scale:.4g} x the reference{words}{_TOO_OFTEN if is_summed_twice else ''}",
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
    if not wrong or not right or max(p.error for p in right) > FAR * min(p.error for p in wrong):
        return None
    ranks = {rank for part in wrong for rank in part.ranks}
    everybody = {rank for part in e.comparison.parts for rank in part.ranks}
    return Cause(
        CauseName.SOME_RANKS,
        f"only the shards of {name_ranks(ranks, everybody, e.mesh)} are wrong",
        evidence=tuple(f"rank {', '.join(map(str, part.ranks))}: error {part.error:.1e}" for part in wrong[:4]),
    )


def _replicas_differ(e: Evidence) -> Cause | None:
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    axes = axes_of_conflict(e)
    return Cause(
        CauseName.REPLICAS_DIFFER,
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
    not_finite,
    optimizer.not_updated,
    optimizer.other_settings,
    optimizer.updated_twice,
    _zeros,
    integers.offset,
    _missing_all_reduce,
    _missing_average,
    _wrong_group,
    _missing_all_reduce_before_bias,
    _gradient_norm,
    find_own_statistics,
    values.partial_sum,
    _constant_factor,
    values.other_tensors,
    values.moved,
    values.transposed,
    values.bias,
    values.some_rows,
    uneven_weights,
    operands.lookup,
    operands.stale_input,
    operands.microbatches,
    operands.backward_left_out,
    optimizer.other_count,
    values.weaker_dtype,
    _some_ranks,
    optimizer.tied_copies,
    _replicas_differ,
    values.other_message,
)


def axes_of_conflict(e: Evidence) -> list[str]:
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


def _explained_here(e: Evidence, scale: float) -> tuple[list[str], str]:
    """The same with the axes of the tensor's own factorisation first; an update's gradient is right on all of them."""
    if e.comparison.id.kind is Kind.UPDATE:
        return [], ""
    axes, words = _explained(scale, _sizes_around(e))
    return (axes, words) if axes else _explained(scale, e.sizes)


def _explained(scale: float, sizes: Mapping[str, int]) -> tuple[list[str], str]:
    """The axes whose size is this factor, or its inverse, in words: all of them, as none can be told from another."""
    for factor, over in ((scale, ""), (1 / scale, "1/")):
        axes = [axis for axis, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=0.01)]
        if axes:
            named = " or ".join(f"{over}{_NAMED.get(axis, axis)}" for axis in axes)
            return axes, f": scaled by {named} ({', '.join(f'{axis}={sizes[axis]}' for axis in axes)})"
    return [], ""
