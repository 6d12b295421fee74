"""Gradients that are mathematically zero, proven so and judged by the size of their siblings.

A key's bias moves all scores of a query alike, so softmax takes its gradient to be zero: what is recorded is rounding
alone, in the reference, its twins and every right candidate, and relative to itself its error says nothing. What it is
next to nothing of, its siblings say: the gradients of the same kind that are nearest by name, the key's weight here. So
errors are measured in units of those, and rounding is as large as the reference's own values or its twins' errors are.

One twin that is far from the reference does not prove a zero: it may be damaged. A zero is small compared with its
siblings, or with the terms of its sum, and the twins agree on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ttrace.judge.tolerance.twins import ZERO_ERROR, is_zero
from ttrace.judge.verdict import Tolerance, ToleranceRule
from ttrace.layouts.ids import Kind, TensorId
from ttrace.values.stats import Stats

_AGREED = ZERO_ERROR / 3
"""The error that at least half of the twins have in a gradient that is zero but for rounding."""

TwinStats = Mapping[TensorId, Sequence[Stats]]
Tolerances = Mapping[TensorId, Tolerance]


def measure_by_siblings(
    tolerances: Tolerances, twins: TwinStats, *, margin: float, rounding_of_terms: Callable[[TensorId], float]
) -> dict[TensorId, Tolerance]:
    """Measure gradients that are proven zero in units of their siblings, if an error of that size would show.

    `rounding_of_terms` returns how large rounding of the summed terms makes an element of a gradient.
    """
    # A tolerance of 1 leaves all of an update to rounding, if not yet all of the gradient.
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
    """Mark what a step made of a gradient that is proven zero: rounding decides it, too.

    A step may also add rounding of its own to a gradient that is judged. A square's error is twice its gradient's, and
    an update may be smaller than what the parameter's dtype can hold.
    """
    result = dict(tolerances)
    for tensor_id, tolerance in tolerances.items():
        if tensor_id.kind.is_of_param and not _is_gradient(tensor_id):
            steps = range(tensor_id.step + (tensor_id.kind is not Kind.PARAM))
            ids = (TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD) for step in steps)
            gradients = [tolerances[t] for t in ids if t in tolerances]
            is_agreed = len(twins[tensor_id]) > 1 and _is_agreed(twins[tensor_id])
            follows = any(g.is_proven_zero or _is_followed(tolerance, g, margin, is_agreed) for g in gradients)
            if follows != tolerance.is_proven_zero:
                result[tensor_id] = replace(tolerance, is_proven_zero=follows)
    return result


def _is_followed(tolerance: Tolerance, gradient: Tolerance, margin: float, is_agreed: bool) -> bool:
    """Whether rounding alone makes what followed from a judged gradient as uncertain as it is large."""
    if is_zero((gradient.twin_error,)) or not is_zero((tolerance.twin_error,)):
        return False
    return is_agreed or tolerance.twin_error <= margin * gradient.twin_error


def _is_gradient(tensor_id: TensorId) -> bool:
    return tensor_id.kind.is_activation_grad or tensor_id.kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD)


def _is_agreed(twins: Sequence[Stats]) -> bool:
    """Whether not only the worst of the twins takes this for zero."""
    return bool(twins) and statistics.median_low([s.error for s in twins]) >= _AGREED


def _measure_siblings(ids: Sequence[TensorId], tolerances: Tolerances, twins: TwinStats) -> dict[TensorId, float]:
    """Of each id, the size of its siblings' elements; those that have none are left out."""
    others: dict[tuple[Kind, int, int | None], dict[str, float]] = {}
    for t, tolerance in tolerances.items() if ids else ():
        is_sound = _is_gradient(t) and not is_zero((tolerance.twin_error,))
        if is_sound and (size := _measure_size(twins[t])):
            others.setdefault((t.kind, t.step, t.microbatch), {})[t.name] = size
    near = ((t, {n: s for n, s in others.get((t.kind, t.step, t.microbatch), {}).items() if n != t.name}) for t in ids)
    return {t: size for t, beside in near if (size := _measure_nearest(t.name, beside))}


def _measure_nearest(name: str, others: Mapping[str, float]) -> float:
    """The size of an element of the nearest siblings, the middle one's; 0 without any."""
    near = {other: _count_shared_modules(name, other) for other in others}
    most = max(near.values(), default=0)
    nearest = [others[other] for other in others if near[other] == most]
    return statistics.median(nearest) if nearest else 0.0


def _count_shared_modules(name: str, other: str) -> int:
    """How many modules both are inside of."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), 0)


def _measure_size(twins: Sequence[Stats]) -> float:
    """The rms of the reference's elements; 0 where that is not known."""
    return _rms(twins[0].aa, twins[0].count) if twins and twins[0].finite_a else 0.0


def _measure_noise(twins: Sequence[Stats]) -> float:
    """How large rounding alone makes an element; infinite where a twin is not finite."""
    if not all(s.finite_a and s.finite_b for s in twins):
        return math.inf
    return max((_rms(square, s.count) for s in twins for square in (s.aa, s.dd)), default=math.inf)


def _rms(squares: float, count: int) -> float:
    return math.sqrt(squares / count) if count else 0.0
