"""Tolerances of scales, which reveal a wrong factor that is smaller than rounding errors.

The scale of a tensor, <a, b> / <a, a>, averages rounding over all of its elements, so it differs from 1 by far less
than the error: in bf16 a weight's gradient may have an error of 6%, but a scale error of only 1%. The same twins show
how far rounding moves the scale: its noise. Three twins show little about one tensor, so each tensor's noise is at
least the usual noise of its kind, given its own twins' error and its size (docs/decisions/0009-scale.md).
findings/global_scale.py judges all tensors of a kind together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ttrace.judge.reason import Reason, Why
from ttrace.judge.tolerance.twins import TINY, is_zero
from ttrace.judge.verdict import Comparison, Tolerance, ToleranceRule, ToleranceTerm, Verdict
from ttrace.layouts.ids import Kind, TensorId, drop_numbers
from ttrace.values.stats import Stats, measure_rms

SCALE_MARGIN = 6.0
"""In units of noise, where the error's margin is 4: clean runs stayed within 4.2 (docs/decisions/0009-scale.md)."""
NOISE_FLOOR = 1 / 3
"""The least noise, in units of the tensor's floor, so that no tensor with a scale error within 2 u is wrong.

If all elements are equal, one rounding moves the scale by u, and sums over many tokens are rounded more than once. A
floor of 1/8 accused a clean run (docs/decisions/0009-scale.md).
"""
_POWER = 0.25
"""Noise falls with the number of elements, but slower than with its root: their errors are not independent.

Powers of 0 and 1/2 were tried, too (docs/decisions/0009-scale.md).
"""

TwinStats = Mapping[TensorId, Sequence[Stats]]

SCALED_KINDS = {
    Kind.INPUT: "inputs",
    Kind.OUTPUT: "outputs",
    Kind.GRAD_OUTPUT: "gradients of outputs",
    Kind.GRAD_INPUT: "gradients of inputs",
    Kind.PARAM_GRAD: "parameter gradients",
    Kind.MAIN_GRAD: "main gradients",
}
"""The kinds that are judged by their scale, in the order in which they are computed.

Updates and optimizer states are not: one step of Adam hardly depends on the size of its gradient.
"""


def add_scale(
    tolerances: Mapping[TensorId, Tolerance], twins: TwinStats, *, margin: float = SCALE_MARGIN
) -> dict[TensorId, Tolerance]:
    """Add to each tolerance the limit of its scale: how far it may be from 1."""
    usual = _measure_usual(tolerances, twins)
    result = dict(tolerances)
    for tensor_id, tolerance in tolerances.items():
        limit = margin * _measure_noise(tensor_id, tolerance, twins[tensor_id], usual)
        if math.isfinite(limit):
            terms = (*tolerance.terms, ToleranceTerm(ToleranceRule.SCALE, limit))
            result[tensor_id] = replace(tolerance, scale=limit, terms=terms)
    return result


def judge_scale(comparison: Comparison) -> Comparison:
    """Fail a comparison if only its scale shows that it is wrong."""
    tolerance = comparison.tolerance
    if comparison.verdict is not Verdict.PASS or tolerance is None or comparison.scale_error <= tolerance.scale:
        return comparison
    why = Why(Reason.MIS_SCALED, value=comparison.stats.scale, limit=tolerance.scale)
    return replace(comparison, verdict=Verdict.FAIL, why=why)


def is_by_scale(comparison: Comparison) -> bool:
    """Whether only its scale shows that a tensor is wrong."""
    return comparison.verdict is Verdict.FAIL and comparison.reason is Reason.MIS_SCALED


_Place = tuple[Kind, str]
"""A kind, and a module or parameter of any layer."""


def _measure_usual(tolerances: Mapping[TensorId, Tolerance], twins: TwinStats) -> dict[_Place, float]:
    """Measure for each place how far the twins' scales are off, in units of their error at one element.

    This is the rms of the kind, or a third of the largest value of this place in any layer if that is larger. Some
    products have few large elements, and their scales vary more than those of other products
    (tests/judge/tolerance/test_scale.py::test_a_place_that_strays_is_known).
    """
    ratios_at: dict[_Place, list[float]] = {}
    for tensor_id, tolerance in tolerances.items():
        if _is_judged(tensor_id, tolerance, twins[tensor_id]):
            ratios = ((s.scale - 1) / s.error * math.pow(s.count, _POWER) for s in twins[tensor_id] if s.error > 0.0)
            ratios_at.setdefault(_place(tensor_id), []).extend(ratios)
    kinds = {kind: rms(r for (k, _), ratios in ratios_at.items() if k is kind for r in ratios) for kind, _ in ratios_at}
    return {place: max(kinds[place[0]], max(map(abs, ratios), default=0.0) / 3) for place, ratios in ratios_at.items()}


def _place(tensor_id: TensorId) -> _Place:
    return tensor_id.kind, drop_numbers(tensor_id.name)


def _measure_noise(
    tensor_id: TensorId, tolerance: Tolerance, twins: Sequence[Stats], usual: Mapping[_Place, float]
) -> float:
    """Measure how far rounding moves the scale of this tensor; infinite if that is not known."""
    if not _is_judged(tensor_id, tolerance, twins):
        return math.inf
    own = max((abs(s.scale - 1) for s in twins), default=0.0)
    expected = usual[_place(tensor_id)] * tolerance.twin_error / math.pow(twins[0].count, _POWER)
    return max(own, expected, NOISE_FLOOR * tolerance.floor)


def _is_judged(tensor_id: TensorId, tolerance: Tolerance, twins: Sequence[Stats]) -> bool:
    is_zero_like = bool(tolerance.size) or is_zero((tolerance.twin_error,))
    is_right = all(math.isfinite(s.error) and s.aa > 0.0 for s in twins) and not is_zero_like
    return (
        tensor_id.kind in SCALED_KINDS and tolerance.floor > 0.0 and is_right and bool(twins) and twins[0].count >= TINY
    )


def rms(values: Iterable[float]) -> float:
    """Compute the root mean square of numbers; 0 of none."""
    squares = [value * value for value in values]
    return measure_rms(sum(squares), len(squares))
