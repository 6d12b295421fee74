"""Factors that all tensors of a kind share, and that are smaller than rounding errors.

The scale of a tensor is s = <a, b> / <a, a>. For all tensors i of a kind, with the noise n_i of each scale
(tolerance/scale.py), the mean deviation is

    m = sum(w_i * (s_i - 1)) / sum(w_i),    w_i = 1 / n_i**2,

for the candidate and for each twin t alike (m_t). The kind is mis-scaled if |m| > margin * sigma, where sigma is the
largest of

- rms(m_t), the deviations of the twins,
- rms(m_t) over all kinds of the same phase,
- sigma_0 * rms(m_t / sigma_0) over all kinds, where sigma_0 = sum(w_i)**-0.5 would be the noise of independent errors,
- a floor, u / 12 for 16 bits and u / 3 for float32.

sigma_0 alone is never used: all gradients follow from one loss, so their errors do not average out. Gradients of
parameters are also compared with those of activations, where the common part cancels (docs/decisions/0009-scale.md
gives the measurements).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.judge.reason import describe
from ttrace.judge.tolerance.scale import NOISE_FLOOR, SCALE_MARGIN, SCALED_KINDS, TwinStats, is_by_scale, rms
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import ROOT, Kind, Phase
from ttrace.values.stats import Stats

MANY = 8
"""The number of tensors of a kind from which on they are judged together."""


def name_mis_scaled(finding: Finding) -> Finding:
    """Name the cause of a finding that only the scale shows: the elements are too noisy to show a pattern."""
    if not is_by_scale(finding.comparison):
        return finding
    return replace(finding, cause=Cause(CauseName.MIS_SCALED, describe(finding.comparison.why)))


def find_global_scale(
    comparisons: Sequence[Comparison], twins: TwinStats, *, margin: float = SCALE_MARGIN
) -> tuple[Finding, ...]:
    """Find a factor that all tensors of a kind share, and that is too small to show in most of them alone.

    It is looked for only if nothing else is wrong. The first mis-scaled kind explains those that follow from it.
    """
    wrong = [comparison for comparison in comparisons if comparison.verdict.is_wrong]
    if not all(map(is_by_scale, wrong)):
        return ()
    deviating = [pool for pool in _make_pools(comparisons, twins, margin) if abs(pool.mean) > margin * pool.sigma]
    if not deviating or not all(any(pool.explains(c) for pool in deviating) for c in wrong):
        return ()
    first, rest = deviating[0], [str(pool) for pool in deviating[1:]]
    alone = f"only {len(wrong)} show it alone" if wrong else "each is within rounding noise"
    sentence = f"{first}: {alone}, but together they deviate by {abs(first.mean) / first.sigma:.0f} sigma"
    return (
        Finding(
            first.comparisons[0], ROOT, "", Cause(CauseName.MIS_SCALED, sentence, evidence=tuple(rest)), num_after=0
        ),
    )


@dataclass(frozen=True)
class _Pool:
    """All tensors of a kind, with the terms of the module's formula."""

    kind: Kind
    comparisons: Sequence[Comparison]
    mean: float
    """The mean deviation m of the candidate's scales from 1."""
    twin_means: Sequence[float]
    """The same mean for each twin."""
    independent: float
    """The noise of the mean if the tensors' errors were independent, sigma_0."""
    floor: float
    sigma: float = 0.0
    relative_words: str = ""
    """Words for the kind that the mean is relative to, if not to 1."""

    def __str__(self) -> str:
        who = f"all {len(self.comparisons)} {SCALED_KINDS[self.kind]} together"
        return f"{who} are {1 + self.mean:.5g} x the reference{self.relative_words}"

    def explains(self, comparison: Comparison) -> bool:
        """Whether a tensor deviates as much as all of the kind do."""
        limit = comparison.tolerance.scale if comparison.tolerance is not None else 0.0
        return comparison.id.kind is self.kind and abs(comparison.stats.scale - 1 - self.mean) <= limit

    def relative_to(self, other: _Pool) -> _Pool:
        """Subtract what both kinds share: the errors of the loss and of everything that follows from it."""
        # Some twins may lack tensors of one kind.
        twin_means = [mine - theirs for mine, theirs in zip(self.twin_means, other.twin_means, strict=False)]
        words = f", those of {SCALED_KINDS[other.kind]} apart"
        return replace(self, mean=self.mean - other.mean, twin_means=twin_means, relative_words=words)


def _make_pools(comparisons: Sequence[Comparison], twins: TwinStats, margin: float) -> list[_Pool]:
    """Pool every kind by itself, and the gradients of parameters relative to those of activations."""
    pools = {kind: pool for kind in SCALED_KINDS if (pool := _make_pool(kind, comparisons, twins, margin)) is not None}
    # Three twins say little about one kind, so the excess over independent noise is taken from all kinds together.
    excess = rms(mean / pool.independent for pool in pools.values() for mean in pool.twin_means)
    by_phase = {phase: _rms_of_twins(p for p in pools.values() if p.kind.phase is phase) for phase in Phase}
    absolute = [
        replace(p, sigma=max(rms(p.twin_means), by_phase[p.kind.phase], excess * p.independent, p.floor))
        for p in pools.values()
    ]
    finals = [pools[kind] for kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD) if kind in pools]
    activations = [pools[kind] for kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT) if kind in pools]
    relative = [final.relative_to(other) for final in finals for other in activations]
    noise = _rms_of_twins(relative)
    return absolute + [replace(p, sigma=max(rms(p.twin_means), noise, p.floor)) for p in relative]


def _rms_of_twins(pools: Iterable[_Pool]) -> float:
    return rms(mean for pool in pools for mean in pool.twin_means)


def _make_pool(kind: Kind, comparisons: Sequence[Comparison], twins: TwinStats, margin: float) -> _Pool | None:
    known = [(c, c.tolerance) for c in comparisons if c.id.kind is kind and c.tolerance is not None and _is_pooled(c)]
    if len(known) < MANY:
        return None
    # The limit of a scale is margin * noise: the weights of the formula times 1 / margin**2, which cancels in means.
    weights = [1.0 / t.scale**2 for _, t in known]
    total = sum(weights)

    def mean(stats: Iterable[Stats]) -> float:
        return sum(weight * (s.scale - 1) for weight, s in zip(weights, stats, strict=True)) / total

    num_twins = min(len(twins[c.id]) for c, _ in known)
    twin_means = [mean(twins[c.id][twin] for c, _ in known) for twin in range(num_twins)]
    floor = max(_find_floor(t.floor) for _, t in known)
    pooled, independent = [c for c, _ in known], 1.0 / (margin * math.sqrt(total))
    return _Pool(kind, pooled, mean(c.stats for c in pooled), twin_means, independent, floor)


def _is_pooled(comparison: Comparison) -> bool:
    """Whether a tensor counts in the mean: twins changed it, so its noise is known, and only its scale may be wrong."""
    tolerance = comparison.tolerance
    if tolerance is None or math.isinf(tolerance.scale) or tolerance.twin_error == 0.0:
        return False
    return comparison.verdict is Verdict.PASS or is_by_scale(comparison)


def _find_floor(floor: float) -> float:
    """Return the least noise of a mean: 16-bit products are summed in float32, but float32 rounds every sum."""
    share = NOISE_FLOOR if floor <= unit(torch.float32) else NOISE_FLOOR / 4
    return share * floor
