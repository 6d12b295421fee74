"""Causes in how ranks combine tensors: sums and averages that are missing, done twice, or over the wrong ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure_shards
from ttrace.judge.tensors.rank_names import name_ranks
from ttrace.judge.tensors.values import Values, measure_common_row
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, STEP, Kind, TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.trace.reader import Shard

_NAMED = {MICROBATCH_AXIS: "the number of microbatches"}


@cause(
    CauseName.MISSING_ALL_REDUCE,
    after="find_offset",
    shown_by="replicas differ, and sum to the reference along an axis",
    fault="row without its sum",
)
def find_missing_all_reduce(e: Evidence) -> Cause | None:
    """Find replicas along an axis that differ, and whose sum is the reference."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in find_conflict_axes(e):
        error = e.error_of(_sum_over(e, axis))
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


@cause(
    CauseName.MISSING_AVERAGE,
    after="find_missing_all_reduce",
    shown_by="replicas differ, and average to the reference along an axis",
    fault="not synchronised",
)
def find_missing_average(e: Evidence) -> Cause | None:
    """Find replicas along an axis that differ, and whose mean is the reference."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in find_conflict_axes(e):
        if not e.comparison.id.kind.is_of_param and _has_equal(e, axis):
            continue  # only gradients of parameters are averaged: more likely the other axis was summed over
        error = e.error_of(_sum_over(e, axis), 1 / e.sizes[axis])
        if e.is_explained(error):
            return Cause(
                CauseName.MISSING_AVERAGE,
                f"replicas differ and average to the reference: missing gradient averaging over {axis}{_say_when(e)}",
                axis,
                (f"their mean over {axis}={e.sizes[axis]} is the reference to {error:.1e}",),
            )
    return None


def _say_when(e: Evidence) -> str:
    """Say when gradients were read, if they may have been averaged afterwards."""
    clip = TensorId.of(e.comparison.id.step, None, ROOT, Kind.CLIP)
    return " before gradients are clipped" if clip in e.candidate_trace.shards else ""


def _has_equal(e: Evidence, axis: str) -> bool:
    return any(size == e.sizes[axis] for other, size in e.mesh.sizes.items() if other != axis)


@cause(
    CauseName.WRONG_GROUP,
    after="find_missing_average",
    shown_by="replicas differ along one axis, and their sum is the reference times the size of another",
    unproven="no entry mixes up two axes; tests/judge/causes/test_reductions.py",
)
def find_wrong_group(e: Evidence) -> Cause | None:
    """Find replicas along one axis that differ, and whose sum is the reference times the size of another."""
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    for axis in find_conflict_axes(e):
        summed = _sum_over(e, axis)
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


@cause(
    CauseName.MISSING_ALL_REDUCE,
    after="find_wrong_group",
    shown_by="replicas sum to the reference plus a bias that each of them added",
    unproven="the catalogue's row-parallel layers add their bias after the sum; tests/judge/causes/test_reductions.py",
)
def find_missing_all_reduce_before_bias(e: Evidence) -> Cause | None:
    """Find replicas that sum to the reference plus one row for each: a bias that was added before the sum."""
    if e.comparison.verdict is not Verdict.CONFLICT or len(e.reference.shape) < 2:
        return None
    reference = Values(e.reference)
    for axis in find_conflict_axes(e):
        _, rest = measure_common_row(reference, Values(_sum_over(e, axis), e.factor))
        if e.is_explained(rest):
            return Cause(
                CauseName.MISSING_ALL_REDUCE,
                f"replicas differ and sum to the reference plus a bias of each: missing all-reduce over {axis}",
                axis,
                (f"but for one row, their sum over {axis}={e.sizes[axis]} is the reference to {rest:.1e}",),
            )
    return None


@cause(
    CauseName.CLIP_FACTOR,
    after="find_missing_all_reduce_before_bias",
    shown_by="the clip factor is wrong while gradients and their norm are right",
    fault="other max_norm",
)
def find_clip_factor(e: Evidence) -> Cause | None:
    """Find a wrong clip factor of a right norm."""
    kind, ratio = e.comparison.id.kind, e.stats.scale
    has_norm = e.comparison.id.at(Kind.GRAD_NORM) in e.reference_trace.shards
    if kind is not Kind.CLIP or not has_norm or not math.isfinite(ratio) or ratio <= 0.0:
        return None
    words = f"gradients and their norm are right, but the clip factor is {ratio:.4g} x the reference's"
    return Cause(CauseName.CLIP_FACTOR, words)


@cause(
    CauseName.GRADIENT_NORM,
    after="find_clip_factor",
    shown_by="the norm is wrong while gradients are right",
    fault="norm counts twice",
)
def find_gradient_norm(e: Evidence) -> Cause | None:
    """Find a wrong norm of right gradients: it counts shared gradients several times, or leaves shards out."""
    kind, ratio = e.comparison.id.kind, e.stats.scale
    if kind not in (Kind.GRAD_NORM, Kind.CLIP) or not math.isfinite(ratio) or ratio <= 0.0:
        return None
    axis = _find_axis_left_out(e)
    if axis is not None:
        words = f"the gradients are right, but each rank has the norm of its own: not combined over {axis}"
        return Cause(CauseName.GRADIENT_NORM, words, axis, (f"their squares over {axis} sum to the reference's",))
    square = ratio**2 if kind is Kind.GRAD_NORM else ratio**-2
    axes, words = _name_axes(square, e.sizes)
    return Cause(
        CauseName.GRADIENT_NORM,
        f"the gradients are right, but their norm is {ratio if kind is Kind.GRAD_NORM else 1 / ratio:.4g} x the "
        f"reference's{f'; its square is{words[1:]}' if words else ''}",
        axes[0] if len(axes) == 1 else None,
    )


def _find_axis_left_out(e: Evidence) -> str | None:
    """The axis over whose ranks the squares of a norm sum to the reference's square."""
    if e.comparison.id.kind is not Kind.GRAD_NORM or e.comparison.verdict is not Verdict.CONFLICT:
        return None
    whole = float(e.reference.tensor())
    for axis in find_conflict_axes(e):
        shares = [float(replicas[0].tensor()) for replicas in _sum_over(e, axis).pieces[0].summands]
        if math.isclose(math.hypot(*shares), whole, rel_tol=max(MOST_TOLERANCES * e.tolerance, 1e-12)):
            return axis
    return None


@cause(
    CauseName.DOUBLE_REDUCTION,
    after="find_partial_sum",
    shown_by="the reference times the size of an axis",
    fault="sums twice",
)
def find_double_reduction(e: Evidence) -> Cause | None:
    """Find a candidate that is the reference times the size of an axis."""
    factor = _measure_factor(e)
    if factor is None or factor.value <= 1.0 or not factor.axes or MICROBATCH_AXIS in factor.axes:
        return None
    return factor.as_cause(CauseName.DOUBLE_REDUCTION, ", as if summed once too often")


@cause(
    CauseName.CONSTANT_FACTOR,
    after="find_double_reduction",
    shown_by="the reference times another number: the inverse of a size, the number of microbatches, or any other",
    fault="wrong sign",
)
def find_constant_factor(e: Evidence) -> Cause | None:
    """Find a candidate that is the reference times any other number."""
    factor = _measure_factor(e)
    return None if factor is None else factor.as_cause(CauseName.CONSTANT_FACTOR)


@dataclass(frozen=True)
class _Factor:
    """One number by which the whole candidate is multiplied, and the axes whose size it is."""

    value: float
    rest: float
    """The error that is left without it."""
    axes: Sequence[str]
    words: str

    def as_cause(self, name: CauseName, ending: str = "") -> Cause:
        return Cause(
            name,
            f"the candidate is {self.value:.4g} x the reference{self.words}{ending}",
            self.axes[0] if len(self.axes) == 1 else None,
            (f"without that factor the error is {self.rest:.1e}",),
        )


def _measure_factor(e: Evidence) -> _Factor | None:
    """The factor by which the candidate differs, if that explains the difference."""
    s = e.stats
    if s.aa == 0.0 or not math.isfinite(s.scale) or e.comparison.verdict is not Verdict.FAIL:
        return None
    if e.comparison.id.site.slot == STEP:
        return None  # nobody scales the number of a step
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if rest > min(
        MOST_TOLERANCES * e.tolerance * max(abs(s.scale), 1.0), MOST_OF_ERROR * abs(s.scale), MOST_OF_ERROR * s.error
    ):
        return None
    axes, words = _name_axes_here(e, s.scale)
    if s.count == 1 and not axes:
        return None  # one number is always a multiple of another
    return _Factor(s.scale, rest, axes, words)


@cause(
    CauseName.SOME_RANKS,
    after="find_weaker_dtype",
    shown_by="only the shards of some ranks are wrong, or, under data parallelism, only the microbatches they ran",
    fault="shard without gradient",
)
def find_wrong_ranks(e: Evidence) -> Cause | None:
    """Find the ranks whose shards are wrong, if others are right."""
    if e.comparison.verdict is not Verdict.FAIL:
        return None
    wrong = [part for part in e.comparison.region_errors if part.error > e.tolerance]
    right = [part for part in e.comparison.region_errors if part.error <= e.tolerance]
    # Shards just above and just below the tolerance are nearly the same.
    if not wrong or not right or max(p.error for p in right) > MOST_OF_ERROR * min(p.error for p in wrong):
        return None
    ranks = {rank for part in wrong for rank in part.ranks}
    everybody = {rank for part in e.comparison.region_errors for rank in part.ranks}
    return Cause(
        CauseName.SOME_RANKS,
        f"only the shards of {name_ranks(ranks, everybody, e.mesh)} are wrong",
        evidence=tuple(f"rank {', '.join(map(str, part.ranks))}: error {part.error:.1e}" for part in wrong[:4]),
    )


@cause(
    CauseName.REPLICAS_DIFFER,
    after="find_tied_copies",
    shown_by="replicas that must agree differ, and nothing more is known",
    fault="replica drifts",
)
def find_differing_replicas(e: Evidence) -> Cause | None:
    if e.comparison.verdict is not Verdict.CONFLICT:
        return None
    axes = find_conflict_axes(e)
    return Cause(
        CauseName.REPLICAS_DIFFER,
        f"replicas that must agree differ along {', '.join(axes) or 'no single axis'}",
        axes[0] if len(axes) == 1 else None,
        (f"replicas differ by {e.comparison.replica_error:.1e}", *_describe_wrong_replicas(e)),
    )


def _describe_wrong_replicas(e: Evidence) -> list[str]:
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


def find_conflict_axes(e: Evidence) -> list[str]:
    """Find the axes along which replicas differ that have the same place on every other axis."""
    return [axis for axis, size in e.mesh.sizes.items() if size > 1 and _differs_along(e, axis)]


def _differs_along(e: Evidence, axis: str) -> bool:
    for piece in e.candidate.pieces:
        for group in _group_replicas(e, piece, axis):
            if any(measure_shards(group[0], other).error > e.replica_tolerance for other in group[1:]):
                return True
    return False


def _group_replicas(e: Evidence, piece: Piece, axis: str) -> Iterator[list[Shard]]:
    """Replicas that differ in their place on this axis alone, within the first factorisation that has it."""
    axes = next([name for name, _ in part] for part in e.mesh.factorisations if axis in dict(part))
    for replicas in piece.summands:
        groups: dict[tuple[int, ...], list[Shard]] = {}
        for shard in replicas:
            rest = tuple(shard.coord[name] for name in axes if name != axis)
            groups.setdefault((shard.record.microbatch, *rest), []).append(shard)
        yield from (group for group in groups.values() if len(group) > 1)


def _sum_over(e: Evidence, axis: str) -> LogicalTensor:
    """The same shards, with the replicas along an axis read as summands."""
    pieces = []
    for piece in e.candidate.pieces:
        group = next(_group_replicas(e, piece, axis), list(piece.summands[0]))
        pieces.append(Piece(piece.region, tuple((shard,) for shard in group)))
    return replace(e.candidate, pieces=tuple(pieces), pending=(*e.candidate.pending, axis))


def _find_sizes_around(e: Evidence) -> dict[str, int]:
    """The axes that are the first to suspect: those of the factorisations that the tensor's layout belongs to."""
    words = [word.partition(":")[0] for text in e.candidate.layout.split() for word in text.split("/")[1:]]
    named = (set(words) | set(e.candidate.pending)) & set(e.mesh.sizes)
    parts = [part for part in e.mesh.factorisations if named <= {axis for axis, _ in part}]
    around = {axis for part in parts for axis, _ in part} or set(e.sizes)
    return {axis: size for axis, size in e.sizes.items() if axis in around or axis not in e.mesh.sizes}


def _name_axes_here(e: Evidence, scale: float) -> tuple[list[str], str]:
    """The same with the axes of the tensor's own factorisation first; an update's gradient is right on all of them."""
    if e.comparison.id.kind is Kind.UPDATE:
        return [], ""
    axes, words = _name_axes(scale, _find_sizes_around(e))
    return (axes, words) if axes else _name_axes(scale, e.sizes)


def _name_axes(scale: float, sizes: Mapping[str, int]) -> tuple[list[str], str]:
    """Name all axes whose size is this factor or its inverse; nothing distinguishes them."""
    for factor, over in ((scale, ""), (1 / scale, "1/")):
        axes = [axis for axis, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=0.01)]
        if axes:
            named = " or ".join(f"{over}{_NAMED.get(axis, axis)}" for axis in axes)
            return axes, f": scaled by {named} ({', '.join(f'{axis}={sizes[axis]}' for axis in axes)})"
    return [], ""
