"""Factors that all tensors of a kind share, and that are smaller than rounding errors.

All tensors of a kind together say more than each: their mean scale is compared with the same mean of the twins. This
never counts on many tensors averaging rounding out, because they share the errors of the loss and of the residual
stream (docs/decisions/0009-scale.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.judge.sentences import describe
from ttrace.judge.tolerance.scale import NOISE_FLOOR, SCALE_MARGIN, SCALED_KINDS, TwinStats, is_by_scale, rms
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import ROOT, Kind
from ttrace.values.stats import Stats

MANY = 8
"""How many tensors of a kind it takes to judge them together."""


def name_mis_scaled(finding: Finding) -> Finding:
    """Name the cause of a finding that only the scale shows: rounding hides patterns of the elements there."""
    if not is_by_scale(finding.comparison):
        return finding
    return replace(finding, cause=Cause(CauseName.MIS_SCALED, describe(finding.comparison.why)))


def find_global_scale(
    comparisons: Sequence[Comparison], twins: TwinStats, *, margin: float = SCALE_MARGIN
) -> tuple[Finding, ...]:
    """Find a factor that all tensors of a kind share, and that is too small to show in most of them alone.

    Only for a candidate in which nothing else is wrong. The first kind that is off explains those that follow from it.
    """
    wrong = [comparison for comparison in comparisons if comparison.verdict.is_wrong]
    if not all(map(is_by_scale, wrong)):
        return ()
    departed = [pool for pool in _make_pools(comparisons, twins, margin) if abs(pool.mean) > margin * pool.noise]
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
        who = f"all {len(self.comparisons)} {SCALED_KINDS[self.kind]} together"
        return f"{who} are {1 + self.mean:.5g} x the reference{self.beside}"

    def explains(self, comparison: Comparison) -> bool:
        """Whether a tensor is as far off as all are."""
        limit = comparison.tolerance.scale if comparison.tolerance is not None else 0.0
        return comparison.id.kind is self.kind and abs(comparison.stats.scale - 1 - self.mean) <= limit

    def relative_to(self, other: _Pool) -> _Pool:
        """The same without what both share: the errors of the loss and of all that follows from it."""
        # Some twins may lack tensors of one kind.
        twin_means = [mine - theirs for mine, theirs in zip(self.twin_means, other.twin_means, strict=False)]
        beside = f", those of {SCALED_KINDS[other.kind]} apart"
        return replace(self, mean=self.mean - other.mean, twin_means=twin_means, beside=beside)


def _make_pools(comparisons: Sequence[Comparison], twins: TwinStats, margin: float) -> list[_Pool]:
    """Every kind by itself, and the gradients of parameters relative to those of activations."""
    pools = {kind: pool for kind in SCALED_KINDS if (pool := _make_pool(kind, comparisons, twins, margin)) is not None}
    # Few twins: how much more than independent noise there is, is taken from all kinds together.
    excess = rms(mean / pool.alone for pool in pools.values() for mean in pool.twin_means)
    alike = {way: _rms_of_twins(p for p in pools.values() if p.kind.is_backward == way) for way in (False, True)}
    found = [
        replace(p, noise=max(rms(p.twin_means), alike[p.kind.is_backward], excess * p.alone, p.least))
        for p in pools.values()
    ]
    finals = [pools[kind] for kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD) if kind in pools]
    others = [pools[kind] for kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT) if kind in pools]
    contrasts = [p.relative_to(other) for p in finals for other in others]
    noise = _rms_of_twins(contrasts)
    return found + [replace(p, noise=max(rms(p.twin_means), noise, p.least)) for p in contrasts]


def _rms_of_twins(pools: Iterable[_Pool]) -> float:
    return rms(mean for pool in pools for mean in pool.twin_means)


def _make_pool(kind: Kind, comparisons: Sequence[Comparison], twins: TwinStats, margin: float) -> _Pool | None:
    known = [(c, c.tolerance) for c in comparisons if c.id.kind is kind and c.tolerance is not None and _is_known(c)]
    if len(known) < MANY:
        return None
    weights = [1.0 / t.scale**2 for _, t in known]
    total = sum(weights)

    def mean(stats: Iterable[Stats]) -> float:
        return sum(weight * (s.scale - 1) for weight, s in zip(weights, stats, strict=True)) / total

    num_twins = min(len(twins[c.id]) for c, _ in known)
    twin_means = [mean(twins[c.id][twin] for c, _ in known) for twin in range(num_twins)]
    least = max(_find_least_noise(t.floor) for _, t in known)
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
    return comparison.verdict is Verdict.PASS or is_by_scale(comparison)


def _find_least_noise(floor: float) -> float:
    """The least noise of many tensors: products of 16 bits are summed in float32, those of float32 round every sum."""
    share = NOISE_FLOOR if floor <= unit(torch.float32) else NOISE_FLOOR / 4
    return share * floor
