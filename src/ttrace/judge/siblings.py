"""This module judges gradients that are mathematically zero by the size of their siblings.

A key's bias moves all scores of a query alike, so softmax takes its gradient to be zero: what is recorded is rounding
alone, in the reference, its twins and every right candidate, and relative to itself its error says nothing. What it is
next to nothing of, its siblings say: the gradients of the same kind that are nearest by name, the key's weight here. So
errors are measured in units of those, and rounding is as large as the reference's own values or its twins' errors are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ttrace.judge.tolerance import is_zero
from ttrace.judge.verdict import Tolerance
from ttrace.tensors.ids import Kind, TensorId
from ttrace.values.stats import Stats

TwinStats = Mapping[TensorId, Sequence[Stats]]


def with_siblings(
    tolerances: Mapping[TensorId, Tolerance], twins: TwinStats, *, margin: float
) -> dict[TensorId, Tolerance]:
    """The same tolerances, those of zeros in units of their siblings, where an error of that size would be seen."""
    zeros = [tensor_id for tensor_id in tolerances if _is_zero(tensor_id, tolerances)]
    others: dict[tuple[Kind, int, int | None], dict[str, float]] = {}
    for tensor_id in tolerances if zeros else ():
        if not _is_zero(tensor_id, tolerances) and (size := _size(twins[tensor_id])):
            others.setdefault((tensor_id.kind, tensor_id.step, tensor_id.microbatch), {})[tensor_id.name] = size
    sizes = {t: size for t in zeros if (size := _size_beside(t.name, others.get((t.kind, t.step, t.microbatch), {})))}
    noises = {t: _noise(twins[t]) / size for t, size in sizes.items()}
    usual = {
        kind: statistics.median(n for t, n in noises.items() if t.kind is kind) for kind in {t.kind for t in sizes}
    }
    result = dict(tolerances)
    for tensor_id, size in sizes.items():
        floor = tolerances[tensor_id].floor
        noise = max(noises[tensor_id], usual[tensor_id.kind])
        value = margin * max(noise, floor)
        if value < 1.0:
            result[tensor_id] = replace(tolerances[tensor_id], value=value, twin_error=noise, size=size)
    return result


def _is_zero(tensor_id: TensorId, tolerances: Mapping[TensorId, Tolerance]) -> bool:
    """Updates are not meant: what rounding decides the sign of is left out of them."""
    is_gradient = tensor_id.kind.is_activation_grad or tensor_id.kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD)
    return is_gradient and is_zero((tolerances[tensor_id].twin_error,))


def _size_beside(name: str, others: Mapping[str, float]) -> float:
    """The size of an element of the nearest siblings, the middle one's; 0 without any."""
    near = {other: _nearness(name, other) for other in others}
    nearest = [others[other] for other in others if near[other] == max(near.values())]
    return statistics.median(nearest) if nearest else 0.0


def _nearness(name: str, other: str) -> int:
    """How many modules both are inside of."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), 0)


def _size(twins: Sequence[Stats]) -> float:
    """The rms of the reference's elements; 0 where that is not known."""
    return _rms(twins[0].aa, twins[0].count) if twins and twins[0].finite_a else 0.0


def _noise(twins: Sequence[Stats]) -> float:
    """How large rounding alone makes an element; infinite where a twin is not finite."""
    if not all(s.finite_a and s.finite_b for s in twins):
        return math.inf
    return max(_rms(square, s.count) for s in twins for square in (s.aa, s.dd))


def _rms(squares: float, count: int) -> float:
    return math.sqrt(squares / count) if count else 0.0
