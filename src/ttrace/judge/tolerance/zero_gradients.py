"""Gradients that are mathematically zero, proven so and judged by the size of their siblings.

A key's bias moves all scores of a query alike, so softmax makes its gradient zero. What is recorded is rounding alone,
in the reference, its twins and every correct candidate, so an error relative to the gradient itself has no meaning. Its
error is therefore measured relative to its siblings: the gradients of the same kind with the nearest names, here the
gradient of the key's weight. The rounding error is the larger one of the reference's own values and its
twins' errors.

A gradient is proven zero if it is small compared with its siblings, or no larger than rounding of the terms that it is
the sum of, and if at least half of the twins agree. Each element of a weight's gradient is a sum over tokens of an
arriving gradient times an input, and each element of a bias' gradient is a sum of the arriving gradient. One twin that
is far from the reference proves nothing: it may be damaged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ttrace.judge.tolerance.twins import ZERO_ERROR, is_zero
from ttrace.judge.verdict import Tolerance, ToleranceRule
from ttrace.layouts.ids import ROOT, Kind, TensorId
from ttrace.trace.reader import Trace
from ttrace.values.stats import Stats, measure_rms

_AGREED = ZERO_ERROR / 3
"""The error of at least half of the twins in a gradient that is zero but for rounding. Chosen, not measured."""

TwinStats = Mapping[TensorId, Sequence[Stats]]
Tolerances = Mapping[TensorId, Tolerance]


def measure_by_siblings(
    tolerances: Tolerances, twins: TwinStats, *, margin: float, rounding_of_terms: Callable[[TensorId], float]
) -> dict[TensorId, Tolerance]:
    """Measure gradients that are proven zero in units of their siblings, if an error of that size would show.

    `rounding_of_terms` returns the rounding error of an element of a gradient, from the terms that it is the sum of.
    """
    # With a tolerance of 1, rounding decides all of an update, if not yet all of the gradient.
    doubtful = [t for t, tolerance in tolerances.items() if _is_gradient(t) and tolerance.twin_error * margin >= 1.0]
    sizes = _measure_siblings(doubtful, tolerances, twins)
    noises = {t: _measure_noise(twins[t]) / sizes[t] if t in sizes else math.inf for t in doubtful}
    zeros = [t for t in doubtful if is_zero((tolerances[t].twin_error,)) and t in sizes]
    usual = {kind: statistics.median(noises[t] for t in zeros if t.kind is kind) for kind in {t.kind for t in zeros}}
    result = dict(tolerances)
    for tensor_id in doubtful:
        tolerance, noise = tolerances[tensor_id], noises[tensor_id]
        if not (_is_agreed(twins[tensor_id]) or noise <= margin * tolerance.floor):
            continue
        noise = max(noise, usual.get(tensor_id.kind, 0.0))
        value = margin * max(noise, tolerance.floor)
        if value < 1.0:
            proven = replace(tolerance, is_proven_zero=True)
            if is_zero((tolerance.twin_error,)):
                proven = replace(proven, value=value, twin_error=noise, size=sizes[tensor_id], terms=())
                proven = proven.with_term(ToleranceRule.SIBLINGS, margin * noise)
                proven = proven.with_term(ToleranceRule.FLOOR, margin * tolerance.floor)
            result[tensor_id] = proven
        elif _measure_noise(twins[tensor_id]) <= margin * rounding_of_terms(tensor_id):
            result[tensor_id] = replace(tolerance, is_proven_zero=True)
    return result


def mark_followers(tolerances: Tolerances, twins: TwinStats, *, margin: float) -> dict[TensorId, Tolerance]:
    """Mark what a step made of a gradient that is proven zero, because rounding decides it as well.

    A step may also add its own rounding to a gradient that is judged. The error of a square is twice the error of its
    gradient, and an update may be too small for the parameter's dtype.
    """
    result = dict(tolerances)
    for tensor_id, tolerance in tolerances.items():
        if tensor_id.kind.is_of_param and not _is_gradient(tensor_id):
            steps = range(tensor_id.step + (tensor_id.kind is not Kind.PARAM))
            ids = (TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD) for step in steps)
            gradients = [tolerances[t] for t in ids if t in tolerances]
            is_agreed = len(twins[tensor_id]) > 1 and _is_agreed(twins[tensor_id])
            is_zero_too = any(g.is_proven_zero or _is_rounded_away(tolerance, g, margin, is_agreed) for g in gradients)
            if is_zero_too != tolerance.is_proven_zero:
                result[tensor_id] = replace(tolerance, is_proven_zero=is_zero_too)
    return result


def measure_rounding_of_terms(
    tensor_id: TensorId,
    reference: Trace,
    twins: Mapping[TensorId, Sequence[Stats]],
    tolerances: Mapping[TensorId, Tolerance],
) -> float:
    """Measure the rounding error of an element from the terms of its sum; 0 if the terms were not recorded."""
    if tensor_id.kind not in (Kind.PARAM_GRAD, Kind.MAIN_GRAD):
        return 0.0
    module = tensor_id.name.rpartition(".")[0] or ROOT
    known = [t for t in tolerances if t.name == module and t.step == tensor_id.step and _is_of(tensor_id, t)]
    arriving = [t for t in known if t.kind is Kind.GRAD_OUTPUT and twins[t]]
    inputs = [twins[t][0] for t in known if t.kind is Kind.INPUT and twins[t] and tolerances[t].floor > 0.0]
    has_input = len(reference.shards[tensor_id][0].record.shape) > 1
    squares = sum(twins[t][0].aa / max(_width(t, reference), 1) for t in arriving)
    if has_input:
        squares *= max((s.aa / s.count for s in inputs if s.count), default=0.0)
    rounding = max((max(tolerances[t].twin_error, tolerances[t].floor) for t in arriving), default=0.0)
    return math.sqrt(squares) * rounding


def _is_rounded_away(tolerance: Tolerance, gradient: Tolerance, margin: float, is_agreed: bool) -> bool:
    """Whether a step's own rounding is as large as what the step made of a gradient that is judged."""
    if is_zero((gradient.twin_error,)) or not is_zero((tolerance.twin_error,)):
        return False
    return is_agreed or tolerance.twin_error <= margin * gradient.twin_error


def _is_gradient(tensor_id: TensorId) -> bool:
    return tensor_id.kind.is_activation_grad or tensor_id.kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD)


def _is_agreed(twins: Sequence[Stats]) -> bool:
    """Whether at least half of the twins show a zero."""
    return bool(twins) and statistics.median_low([s.error for s in twins]) >= _AGREED


def _measure_siblings(ids: Sequence[TensorId], tolerances: Tolerances, twins: TwinStats) -> dict[TensorId, float]:
    """Measure for each id the size of its siblings' elements; ids without siblings are left out."""
    others: dict[tuple[Kind, int, int | None], dict[str, float]] = {}
    for t, tolerance in tolerances.items() if ids else ():
        is_sound = _is_gradient(t) and not is_zero((tolerance.twin_error,))
        if is_sound and (size := _measure_size(twins[t])):
            others.setdefault((t.kind, t.step, t.microbatch), {})[t.name] = size
    near = ((t, {n: s for n, s in others.get((t.kind, t.step, t.microbatch), {}).items() if n != t.name}) for t in ids)
    return {t: size for t, beside in near if (size := _measure_nearest(t.name, beside))}


def _measure_nearest(name: str, others: Mapping[str, float]) -> float:
    """Return the median size of the nearest siblings; 0 if there are none."""
    near = {other: _count_shared_modules(name, other) for other in others}
    most = max(near.values(), default=0)
    nearest = [others[other] for other in others if near[other] == most]
    return statistics.median(nearest) if nearest else 0.0


def _count_shared_modules(name: str, other: str) -> int:
    """Count the modules that contain both."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), 0)


def _measure_size(twins: Sequence[Stats]) -> float:
    """Return the rms of the reference's elements; 0 if it is not known."""
    return measure_rms(twins[0].aa, twins[0].count) if twins and twins[0].finite_a else 0.0


def _measure_noise(twins: Sequence[Stats]) -> float:
    """Measure the rounding error of an element of a zero; infinite if a twin is not finite."""
    if not all(s.finite_a and s.finite_b for s in twins):
        return math.inf
    return max((measure_rms(square, s.count) for s in twins for square in (s.aa, s.dd)), default=math.inf)


def _is_of(gradient: TensorId, other: TensorId) -> bool:
    return gradient.microbatch is None or other.microbatch == gradient.microbatch


def _width(tensor_id: TensorId, reference: Trace) -> int:
    """Return the number of features of each token."""
    shape = reference.shards[tensor_id][0].record.shape
    return shape[-1] if shape else 1
