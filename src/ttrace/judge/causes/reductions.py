"""Causes in how ranks combine tensors: sums and averages that are missing, done twice, or over the wrong ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence, cause
from ttrace.judge.tensors.difference import name_ranks
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure_shards
from ttrace.judge.tensors.values import Values, measure_common_row
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, STEP, Kind, TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.trace.reader import Shard

_NAMED = {MICROBATCH_AXIS: "the number of microbatches"}


@cause(
    CauseName.MISSING_ALL_REDUCE,
    verdict=Verdict.CONFLICT,
    shown_by="replicas differ, and sum to the reference along an axis",
    bug="row-without-its-sum",
)
def find_missing_all_reduce(evidence: Evidence) -> Cause | None:
    """Find replicas along an axis that differ, and whose sum is the reference."""
    for axis, total in _sum_replicas(evidence):
        error = evidence.error_of(total)
        if evidence.is_explained(error):
            return Cause(
                CauseName.MISSING_ALL_REDUCE,
                f"replicas differ and sum to the reference: missing all-reduce over {axis}",
                axis,
                (
                    f"replicas differ by {evidence.comparison.replica_error:.1e}",
                    f"their sum over {axis}={evidence.sizes[axis]} is the reference to {error:.1e}",
                ),
            )
    return None


@cause(
    CauseName.MISSING_AVERAGE,
    verdict=Verdict.CONFLICT,
    shown_by="replicas differ, and average to the reference along an axis",
    bug="not-synchronised",
)
def find_missing_average(evidence: Evidence) -> Cause | None:
    """Find replicas along an axis that differ, and whose mean is the reference."""
    for axis, total in _sum_replicas(evidence):
        if not evidence.comparison.id.kind.is_of_param and _has_equal(evidence, axis):
            continue  # only gradients of parameters are averaged; here the sum over the other axis is more likely
        error = evidence.error_of(total, 1 / evidence.sizes[axis])
        if evidence.is_explained(error):
            return Cause(
                CauseName.MISSING_AVERAGE,
                "replicas differ and average to the reference: missing gradient averaging over "
                f"{axis}{_describe_time(evidence)}",
                axis,
                (f"their mean over {axis}={evidence.sizes[axis]} is the reference to {error:.1e}",),
            )
    return None


@cause(
    CauseName.WRONG_GROUP,
    verdict=Verdict.CONFLICT,
    shown_by="replicas differ along one axis, and their sum is the reference times the size of another",
    unproven="no entry mixes up two axes; tests/judge/causes/test_reductions.py",
)
def find_wrong_group(evidence: Evidence) -> Cause | None:
    """Find replicas along one axis that differ, and whose sum is the reference times the size of another."""
    for axis, total in _sum_replicas(evidence):
        for other, size in evidence.mesh.sizes.items():
            error = evidence.error_of(total, 1 / size) if other != axis and size > 1 else math.inf
            if evidence.is_explained(error):
                return Cause(
                    CauseName.WRONG_GROUP,
                    f"summed over {other} instead of {axis}",
                    axis,
                    (f"the sum over {axis}={evidence.sizes[axis]} is {size} x the reference to {error:.1e}",),
                )
    return None


@cause(
    CauseName.MISSING_ALL_REDUCE,
    verdict=Verdict.CONFLICT,
    shown_by="replicas sum to the reference plus a bias that each of them added",
    unproven="the zoo's row-parallel layers add their bias after the sum; tests/judge/causes/test_reductions.py",
)
def find_missing_all_reduce_before_bias(evidence: Evidence) -> Cause | None:
    """Find replicas that sum to the reference plus one row for each: a bias that was added before the sum."""
    if len(evidence.reference.shape) < 2:
        return None
    reference = Values(evidence.reference)
    for axis, total in _sum_replicas(evidence):
        _, rest = measure_common_row(reference, Values(total, evidence.factor))
        if evidence.is_explained(rest):
            return Cause(
                CauseName.MISSING_ALL_REDUCE,
                f"replicas differ and sum to the reference plus a bias of each: missing all-reduce over {axis}",
                axis,
                (f"but for one row, their sum over {axis}={evidence.sizes[axis]} is the reference to {rest:.1e}",),
            )
    return None


@cause(
    CauseName.CLIP_FACTOR,
    kinds=(Kind.CLIP,),
    shown_by="the clip factor is wrong while gradients and their norm are right",
    bug="other-max-norm",
)
def find_clip_factor(evidence: Evidence) -> Cause | None:
    """Find a wrong clip factor of a right norm."""
    ratio = evidence.stats.scale
    has_norm = evidence.comparison.id.at(Kind.GRAD_NORM) in evidence.reference_trace.shards
    if not has_norm or not math.isfinite(ratio) or ratio <= 0.0:
        return None
    words = f"gradients and their norm are right, but the clip factor is {ratio:.4g} x the reference's"
    return Cause(CauseName.CLIP_FACTOR, words)


@cause(
    CauseName.GRADIENT_NORM,
    kinds=(Kind.GRAD_NORM, Kind.CLIP),
    shown_by="the norm is wrong while gradients are right",
    bug="norm-counts-twice",
)
def find_gradient_norm(evidence: Evidence) -> Cause | None:
    """Find a wrong norm of right gradients: it counts shared gradients several times, or leaves shards out."""
    kind, ratio = evidence.comparison.id.kind, evidence.stats.scale
    if not math.isfinite(ratio) or ratio <= 0.0:
        return None
    axis = _find_axis_left_out(evidence)
    if axis is not None:
        words = f"the gradients are right, but each rank has the norm of its own: not combined over {axis}"
        return Cause(CauseName.GRADIENT_NORM, words, axis, (f"their squares over {axis} sum to the reference's",))
    square = ratio**2 if kind is Kind.GRAD_NORM else ratio**-2
    axes, words = _name_axes(square, evidence.sizes)
    return Cause(
        CauseName.GRADIENT_NORM,
        f"the gradients are right, but their norm is {ratio if kind is Kind.GRAD_NORM else 1 / ratio:.4g} x the "
        f"reference's{f'; its square is{words[1:]}' if words else ''}",
        axes[0] if len(axes) == 1 else None,
    )


@cause(
    CauseName.DOUBLE_REDUCTION,
    verdict=Verdict.FAIL,
    shown_by="the reference times the size of an axis",
    bug="sums-twice",
)
def find_double_reduction(evidence: Evidence) -> Cause | None:
    """Find a candidate that is the reference times the size of an axis."""
    factor = _measure_factor(evidence)
    if factor is None or factor.value <= 1.0 or not factor.axes or MICROBATCH_AXIS in factor.axes:
        return None
    return factor.as_cause(CauseName.DOUBLE_REDUCTION, ", as if summed once too often")


@cause(
    CauseName.CONSTANT_FACTOR,
    verdict=Verdict.FAIL,
    shown_by="the reference times another number: the inverse of a size, the number of microbatches, or any other",
    bug="wrong-sign",
)
def find_constant_factor(evidence: Evidence) -> Cause | None:
    """Find a candidate that is the reference times any other number."""
    factor = _measure_factor(evidence)
    return None if factor is None else factor.as_cause(CauseName.CONSTANT_FACTOR)


@cause(
    CauseName.SOME_RANKS,
    verdict=Verdict.FAIL,
    shown_by="only the shards of some ranks are wrong, or, under data parallelism, only the microbatches they ran",
    bug="shard-without-gradient",
)
def find_wrong_ranks(evidence: Evidence) -> Cause | None:
    """Find the ranks whose shards are wrong, if others are right."""
    if evidence.comparison.verdict is not Verdict.FAIL:
        return None
    wrong = [part for part in evidence.comparison.region_errors if part.error > evidence.tolerance]
    right = [part for part in evidence.comparison.region_errors if part.error <= evidence.tolerance]
    # Shards just above and just below the tolerance are nearly equally wrong.
    if not wrong or not right or max(p.error for p in right) > MOST_OF_ERROR * min(p.error for p in wrong):
        return None
    ranks = {rank for part in wrong for rank in part.ranks}
    everybody = {rank for part in evidence.comparison.region_errors for rank in part.ranks}
    return Cause(
        CauseName.SOME_RANKS,
        f"only the shards of {name_ranks(ranks, everybody, evidence.mesh)} are wrong",
        evidence=tuple(f"rank {', '.join(map(str, part.ranks))}: error {part.error:.1e}" for part in wrong[:4]),
    )


@cause(
    CauseName.REPLICAS_DIFFER,
    verdict=Verdict.CONFLICT,
    shown_by="replicas that must agree differ, and nothing more is known",
    bug="replica-drifts",
)
def find_differing_replicas(evidence: Evidence) -> Cause | None:
    """Name the axes along which replicas differ, and the wrong replicas."""
    axes = find_conflict_axes(evidence)
    return Cause(
        CauseName.REPLICAS_DIFFER,
        f"replicas that must agree differ along {', '.join(axes) or 'no single axis'}",
        axes[0] if len(axes) == 1 else None,
        (f"replicas differ by {evidence.comparison.replica_error:.1e}", *_describe_wrong_replicas(evidence)),
    )


def find_conflict_axes(evidence: Evidence) -> list[str]:
    """Find the axes along which replicas with equal coordinates on all other axes differ."""
    return [axis for axis, size in evidence.mesh.sizes.items() if size > 1 and _differs_along(evidence, axis)]


def _describe_time(evidence: Evidence) -> str:
    """Describe when gradients were read, if they may have been averaged afterwards."""
    clip = TensorId.of(evidence.comparison.id.step, None, ROOT, Kind.CLIP)
    return " before gradients are clipped" if clip in evidence.candidate_trace.shards else ""


def _has_equal(evidence: Evidence, axis: str) -> bool:
    """Whether another axis has the same size."""
    return any(size == evidence.sizes[axis] for other, size in evidence.mesh.sizes.items() if other != axis)


def _find_axis_left_out(evidence: Evidence) -> str | None:
    """Find the axis over whose ranks the squares of a norm sum to the reference's square."""
    if evidence.comparison.id.kind is not Kind.GRAD_NORM or evidence.comparison.verdict is not Verdict.CONFLICT:
        return None
    whole = float(evidence.reference.tensor())
    for axis, total in _sum_replicas(evidence):
        shares = [float(replicas[0].tensor()) for replicas in total.pieces[0].summands]
        if math.isclose(math.hypot(*shares), whole, rel_tol=max(MOST_TOLERANCES * evidence.tolerance, 1e-12)):
            return axis
    return None


@dataclass(frozen=True)
class _Factor:
    """One number by which the whole candidate is multiplied."""

    value: float
    rest: float
    """The error that is left without the factor."""
    axes: Sequence[str]
    """The axes whose size the factor or its inverse is."""
    words: str

    def as_cause(self, name: CauseName, ending: str = "") -> Cause:
        return Cause(
            name,
            f"the candidate is {self.value:.4g} x the reference{self.words}{ending}",
            self.axes[0] if len(self.axes) == 1 else None,
            (f"without that factor the error is {self.rest:.1e}",),
        )


def _measure_factor(evidence: Evidence) -> _Factor | None:
    """Measure the factor by which the candidate differs; None if it does not explain the difference."""
    s = evidence.stats
    if s.aa == 0.0 or not math.isfinite(s.scale) or evidence.comparison.id.site.slot == STEP:
        return None  # the number of a step is counted, not scaled
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if rest > min(
        MOST_TOLERANCES * evidence.tolerance * max(abs(s.scale), 1.0),
        MOST_OF_ERROR * abs(s.scale),
        MOST_OF_ERROR * s.error,
    ):
        return None
    axes, words = _name_axes_here(evidence, s.scale)
    if s.count == 1 and not axes:
        return None  # any number is a multiple of any other
    return _Factor(s.scale, rest, axes, words)


def _describe_wrong_replicas(evidence: Evidence) -> list[str]:
    """List the wrong replicas if others are right; summands of a pending sum are not comparable."""
    if evidence.candidate.pending:
        return []
    shards = [(piece, shard) for piece in evidence.candidate.pieces for shard in piece.summands[0]]
    errors = {
        shard.coord.rank: evidence.error_of(replace(evidence.candidate, pieces=(Piece(piece.region, ((shard,),)),)))
        for piece, shard in shards
    }
    wrong = [f"rank {rank}: error {error:.1e}" for rank, error in errors.items() if error > evidence.tolerance]
    return wrong[:4] if len(wrong) < len(errors) else []


def _differs_along(evidence: Evidence, axis: str) -> bool:
    for piece in evidence.candidate.pieces:
        for group in _group_replicas(evidence, piece, axis):
            if any(measure_shards(group[0], other).error > evidence.replica_tolerance for other in group[1:]):
                return True
    return False


def _group_replicas(evidence: Evidence, piece: Piece, axis: str) -> Iterator[list[Shard]]:
    """Group the replicas whose coordinates differ only on this axis, in the first factorisation that has it."""
    axes = next([name for name, _ in part] for part in evidence.mesh.factorisations if axis in dict(part))
    for replicas in piece.summands:
        groups: dict[tuple[int, ...], list[Shard]] = {}
        for shard in replicas:
            rest = tuple(shard.coord[name] for name in axes if name != axis)
            groups.setdefault((shard.record.microbatch, *rest), []).append(shard)
        yield from (group for group in groups.values() if len(group) > 1)


def _sum_replicas(evidence: Evidence) -> Iterator[tuple[str, LogicalTensor]]:
    """Sum the replicas along each axis on which they differ, as an all-reduce over that axis would."""
    return ((axis, _read_as_summands(evidence, axis)) for axis in find_conflict_axes(evidence))


def _read_as_summands(evidence: Evidence, axis: str) -> LogicalTensor:
    """Return the candidate with the replicas along an axis read as summands of a pending sum."""
    pieces = []
    for piece in evidence.candidate.pieces:
        group = next(_group_replicas(evidence, piece, axis), list(piece.summands[0]))
        pieces.append(Piece(piece.region, tuple((shard,) for shard in group)))
    return replace(evidence.candidate, pieces=tuple(pieces), pending=(*evidence.candidate.pending, axis))


def _find_sizes_around(evidence: Evidence) -> dict[str, int]:
    """Find the likeliest axes: those of the factorisations that the tensor's layout belongs to."""
    words = [word.partition(":")[0] for text in evidence.candidate.layout.split() for word in text.split("/")[1:]]
    named = (set(words) | set(evidence.candidate.pending)) & set(evidence.mesh.sizes)
    parts = [part for part in evidence.mesh.factorisations if named <= {axis for axis, _ in part}]
    around = {axis for part in parts for axis, _ in part} or set(evidence.sizes)
    return {axis: size for axis, size in evidence.sizes.items() if axis in around or axis not in evidence.mesh.sizes}


def _name_axes_here(evidence: Evidence, scale: float) -> tuple[list[str], str]:
    """Name the axes of a factor, those of the tensor's own factorisation first; none for an update.

    The gradient of a wrong update is right on all axes, so no reduction explains its factor.
    """
    if evidence.comparison.id.kind is Kind.UPDATE:
        return [], ""
    axes, words = _name_axes(scale, _find_sizes_around(evidence))
    return (axes, words) if axes else _name_axes(scale, evidence.sizes)


def _name_axes(scale: float, sizes: Mapping[str, int]) -> tuple[list[str], str]:
    """Name all axes whose size is this factor or its inverse, as the values do not tell them apart."""
    for factor, over in ((scale, ""), (1 / scale, "1/")):
        axes = [axis for axis, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=0.01)]
        if axes:
            named = " or ".join(f"{over}{_NAMED.get(axis, axis)}" for axis in axes)
            return axes, f": scaled by {named} ({', '.join(f'{axis}={sizes[axis]}' for axis in axes)})"
    return [], ""
