"""This module sees systematic mis-scaling that is smaller than rounding noise.

The scale of a tensor, <a, b> / <a, a>, averages rounding over all of its elements, so it departs from 1 by far less
than the error does: in bf16 a weight's gradient may err by 6%, but its scale by 1%. How far rounding moves it, its
noise, is known from the same twins. Three twins say little of one tensor, so each tensor's noise is at least what is
usual for its kind, given its own twins' error and its size. And all tensors of a kind together say more than each:
their mean scale is held against the same mean of the twins. It never counts on many tensors averaging rounding out, as
they share the errors of the loss and of the residual stream (docs/decisions/0009-scale.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.judge.reason import Reason, Why
from ttrace.judge.sentences import describe
from ttrace.judge.tolerance.estimate import TINY, is_zero, unit
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Tolerance, Verdict
from ttrace.tensors.ids import ROOT, Kind, TensorId, drop_numbers
from ttrace.values.stats import Stats

MARGIN = 6.0
"""In units of noise, where the error's margin is 4: clean runs stay within 3.9."""
FLOOR = 1 / 3
"""The least noise, in units of the tensor's floor, so that no tensor within 2 u of its scale is wrong.

Where all elements are equal, one rounding makes the scale u off, and sums over many tokens are rounded more than once.
"""
POWER = 0.25
"""Noise falls with the number of elements, but slower than with its root: their errors are not independent."""
MANY = 8
"""How many tensors of a kind it takes to speak together."""

TwinStats = Mapping[TensorId, Sequence[Stats]]

_WORDS = {
    Kind.INPUT: "inputs",
    Kind.OUTPUT: "outputs",
    Kind.GRAD_OUTPUT: "gradients of outputs",
    Kind.GRAD_INPUT: "gradients of inputs",
    Kind.PARAM_GRAD: "parameter gradients",
    Kind.MAIN_GRAD: "main gradients",
}
"""The kinds that are judged by their scale, in the order in which they come of each other.

Updates and optimizer states are not: one step of Adam knows little of its gradient's size.
"""


def with_scale(
    tolerances: Mapping[TensorId, Tolerance], twins: TwinStats, *, margin: float = MARGIN
) -> dict[TensorId, Tolerance]:
    """The same tolerances, each also with how far the scale may be from 1."""
    usual = _usual(tolerances, twins)
    return {
        tensor_id: replace(tolerance, scale=margin * _noise(tensor_id, tolerance, twins[tensor_id], usual))
        for tensor_id, tolerance in tolerances.items()
    }


def mis_scaled(comparison: Comparison) -> Comparison:
    """The comparison, failed if only its scale shows that it is wrong."""
    tolerance = comparison.tolerance
    if comparison.verdict is not Verdict.PASS or tolerance is None or comparison.scale_error <= tolerance.scale:
        return comparison
    return replace(comparison, verdict=Verdict.FAIL, why=_measure_scale(comparison, tolerance))


def named(finding: Finding) -> Finding:
    """The finding with its cause, if the scale alone showed it: patterns of the elements are lost in rounding there."""
    if not _is_by_scale(finding.comparison):
        return finding
    return replace(finding, cause=Cause(CauseName.MIS_SCALED, describe(finding.comparison.why)))


def together(comparisons: Sequence[Comparison], twins: TwinStats, *, margin: float = MARGIN) -> tuple[Finding, ...]:
    """A finding if all tensors of a kind are mis-scaled alike, too little to be seen in most of them alone.

    Only of a candidate in which nothing else is wrong. What is mis-scaled first explains the kinds that come of it.
    """
    wrong = [comparison for comparison in comparisons if comparison.verdict.is_wrong]
    if not all(map(_is_by_scale, wrong)):
        return ()
    departed = [pool for pool in _pools(comparisons, twins, margin) if abs(pool.mean) > margin * pool.noise]
    if not departed or not all(any(pool.explains(c) for pool in departed) for c in wrong):
        return ()
    first, rest = departed[0], [str(pool) for pool in departed[1:]]
    alone = f"only {len(wrong)} show it alone" if wrong else "below rounding noise one by one"
    sentence = f"{first}: {alone}, {abs(first.mean) / first.noise:.0f} sigma together"
    return (
        Finding(
            first.comparisons[0], ROOT, "", Cause(CauseName.MIS_SCALED, sentence, evidence=tuple(rest)), num_after=0
        ),
    )


@dataclass(frozen=True)
class _Pool:
    """All tensors of a kind: how far their scales are from 1 on average, in the candidate and in each twin."""

    kind: Kind
    comparisons: Sequence[Comparison]
    mean: float
    twin_means: Sequence[float]
    alone: float
    """The noise if the tensors' were independent."""
    least: float
    noise: float = 0.0
    beside: str = ""
    """What the mean is relative to, if not to 1."""

    def __str__(self) -> str:
        who = f"all {len(self.comparisons)} {_WORDS[self.kind]} together"
        return f"{who} are {1 + self.mean:.5g} x the reference{self.beside}"

    def explains(self, comparison: Comparison) -> bool:
        """Whether a tensor is as far off as all are."""
        limit = comparison.tolerance.scale if comparison.tolerance is not None else 0.0
        return comparison.id.kind is self.kind and abs(comparison.stats.scale - 1 - self.mean) <= limit

    def relative_to(self, other: _Pool) -> _Pool:
        """The same without what both share: the errors of the loss and of all that follows from it."""
        # Some twins may lack tensors of one kind.
        twin_means = [mine - theirs for mine, theirs in zip(self.twin_means, other.twin_means, strict=False)]
        beside = f", those of {_WORDS[other.kind]} apart"
        return replace(self, mean=self.mean - other.mean, twin_means=twin_means, beside=beside)


def _pools(comparisons: Sequence[Comparison], twins: TwinStats, margin: float) -> list[_Pool]:
    """Every kind by itself, and the gradients of parameters relative to those of activations."""
    pools = {kind: pool for kind in _WORDS if (pool := _pool(kind, comparisons, twins, margin)) is not None}
    # Few twins: how much more than independent noise there is, is taken from all kinds together.
    excess = _rms(mean / pool.alone for pool in pools.values() for mean in pool.twin_means)
    alike = {way: _rms_of_twins(p for p in pools.values() if p.kind.is_backward == way) for way in (False, True)}
    found = [
        replace(p, noise=max(_rms(p.twin_means), alike[p.kind.is_backward], excess * p.alone, p.least))
        for p in pools.values()
    ]
    finals = [pools[kind] for kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD) if kind in pools]
    others = [pools[kind] for kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT) if kind in pools]
    contrasts = [p.relative_to(other) for p in finals for other in others]
    noise = _rms_of_twins(contrasts)
    return found + [replace(p, noise=max(_rms(p.twin_means), noise, p.least)) for p in contrasts]


def _rms_of_twins(pools: Iterable[_Pool]) -> float:
    return _rms(mean for pool in pools for mean in pool.twin_means)


def _pool(kind: Kind, comparisons: Sequence[Comparison], twins: TwinStats, margin: float) -> _Pool | None:
    known = [(c, c.tolerance) for c in comparisons if c.id.kind is kind and c.tolerance is not None and _is_known(c)]
    if len(known) < MANY:
        return None
    weights = [1.0 / t.scale**2 for _, t in known]
    total = sum(weights)

    def mean(stats: Iterable[Stats]) -> float:
        return sum(weight * (s.scale - 1) for weight, s in zip(weights, stats, strict=True)) / total

    num_twins = min(len(twins[c.id]) for c, _ in known)
    twin_means = [mean(twins[c.id][twin] for c, _ in known) for twin in range(num_twins)]
    least = max(_least(t.floor) for _, t in known)
    return _Pool(
        kind,
        [c for c, _ in known],
        mean(c.stats for c, _ in known),
        twin_means,
        1.0 / (margin * math.sqrt(total)),
        least,
    )


def _is_known(comparison: Comparison) -> bool:
    """Whether a tensor may speak with others; of what the twins left as it was, rounding says nothing."""
    tolerance = comparison.tolerance
    if tolerance is None or math.isinf(tolerance.scale) or tolerance.twin_error == 0.0:
        return False
    return comparison.verdict is Verdict.PASS or _is_by_scale(comparison)


def _is_by_scale(comparison: Comparison) -> bool:
    """Whether only its scale shows that a tensor is wrong."""
    return comparison.verdict is Verdict.FAIL and comparison.reason is Reason.MIS_SCALED


def _least(floor: float) -> float:
    """The least noise of many tensors: products of 16 bits are summed in float32, those of float32 round every sum."""
    share = FLOOR if floor <= unit(torch.float32) else FLOOR / 4
    return share * floor


_Place = tuple[Kind, str]
"""A kind, and a module or parameter whatever its layer."""


def _usual(tolerances: Mapping[TensorId, Tolerance], twins: TwinStats) -> dict[_Place, float]:
    """Per place, how far the twins' scales are off, in units of their error at one element.

    That is the rms of its kind, or a third of the largest of all layers here: some products have few large elements,
    so that their scales stray further than others'
    (tests/judge/tolerance/test_scale.py::test_a_place_that_strays_is_known).
    """
    found: dict[_Place, list[float]] = {}
    for tensor_id, tolerance in tolerances.items():
        if _is_judged(tensor_id, tolerance, twins[tensor_id]):
            ratios = ((s.scale - 1) / s.error * math.pow(s.count, POWER) for s in twins[tensor_id] if s.error > 0.0)
            found.setdefault(_place(tensor_id), []).extend(ratios)
    kinds = {kind: _rms(r for (k, _), ratios in found.items() if k is kind for r in ratios) for kind, _ in found}
    return {place: max(kinds[place[0]], max(map(abs, ratios), default=0.0) / 3) for place, ratios in found.items()}


def _place(tensor_id: TensorId) -> _Place:
    return tensor_id.kind, drop_numbers(tensor_id.name)


def _noise(tensor_id: TensorId, tolerance: Tolerance, twins: Sequence[Stats], usual: Mapping[_Place, float]) -> float:
    """How far rounding moves the scale of this tensor; infinite where that is not known."""
    if not _is_judged(tensor_id, tolerance, twins):
        return math.inf
    own = max((abs(s.scale - 1) for s in twins), default=0.0)
    expected = usual[_place(tensor_id)] * tolerance.twin_error / math.pow(twins[0].count, POWER)
    return max(own, expected, FLOOR * tolerance.floor)


def _is_judged(tensor_id: TensorId, tolerance: Tolerance, twins: Sequence[Stats]) -> bool:
    is_zero_like = bool(tolerance.size) or is_zero((tolerance.twin_error,))
    is_right = all(math.isfinite(s.error) and s.aa > 0.0 for s in twins) and not is_zero_like
    return tensor_id.kind in _WORDS and tolerance.floor > 0.0 and is_right and bool(twins) and twins[0].count >= TINY


def _measure_scale(comparison: Comparison, tolerance: Tolerance) -> Why:
    return Why(Reason.MIS_SCALED, value=comparison.stats.scale, limit=tolerance.scale)


def _rms(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0
