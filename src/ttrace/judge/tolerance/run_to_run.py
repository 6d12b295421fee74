"""Noise: differences between two runs of one side, which are added to what rounding explains.

Kernels with atomics or split-K, and the backward pass of flash attention, sum in a different order every time. A second
iteration of the reference without a nudge shows the reference's noise, and a second run of the candidate shows the
candidate's. Noise that is at most the margin times what rounding explains is treated as rounding. Larger noise is
caused by a race or by random numbers, and excuses nothing.

Noise is no room for bugs: the errors of two runs of the candidate have a systematic part in common, whatever its noise.
Its square is the inner product of the two errors, <b - a, c - a> = (|b - a|^2 + |c - a|^2 - |b - c|^2) / 2. If it is
beyond the tolerance without the noise, the tensor does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ttrace.errors import SketchError
from ttrace.judge.tensors.logical import LogicalTensor, factor_to_come, measure
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.twins import TINY
from ttrace.judge.verdict import Tolerance, ToleranceRule
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Shard, Trace
from ttrace.values.stats import LEAST_DIVISOR, Stats

_LEAST_RATIO = 2.0
"""A systematic part is at least this many times the noise of one run.

Noise in many directions is nearly orthogonal in two runs, but the few numbers that a noisy scalar or a small tensor
moves may agree by chance. Chosen, not measured.
"""


def is_repeated(one: Trace, again: Trace) -> bool:
    """Whether both runs recorded the same, bit for bit. Updates follow from recorded tensors and are not compared."""
    if one.shards.keys() != again.shards.keys():
        return False
    pairs = ((one.shards[t], again.shards[t]) for t in one.shards if t.kind is not Kind.UPDATE)
    return all(
        len(first) == len(second) and all(_is_same(a, b) for a, b in zip(first, second, strict=True))
        for first, second in pairs
    )


def _is_same(one: Shard, again: Shard) -> bool:
    stats = again.record.stats
    if stats is None:
        return torch.equal(one.read_stored(), again.read_stored())
    return stats.dd == 0.0 and (stats.nan_a, stats.inf_a) == (stats.nan_b, stats.inf_b)


@dataclass(frozen=True)
class Noise:
    """How far a second run of one side is from the first, by id."""

    stats: dict[TensorId, Stats]
    side: str
    """The side: reference or candidate."""
    systematic: Mapping[TensorId, float] = field(default_factory=dict)
    """For the candidate, the relative error that its two runs have in common, where the second one stored values."""

    @classmethod
    def between(cls, first: Trace, again: Trace, rounding: ToleranceModel, side: str = "candidate") -> Noise:
        stats = dict(_measure_differences(first, again, rounding))
        ids = [t for t in stats if stats[t].dd > 0.0] if side == "candidate" else []
        return cls(stats, side, {t: _measure_systematic(t, stats[t], first, again, rounding) for t in ids})

    def is_rounding(self, rounding: ToleranceModel) -> bool:
        """Whether all of it is as small as the effect of a different order of sums.

        A comparison with the twins is not enough: a state that changes from one iteration to the next has changed them
        as well.
        """
        return all(
            self._is_small(t, tolerance, rounding) and tolerance.error(self.stats[t]) <= _allow_reordering(tolerance)
            for t, tolerance in rounding.tolerances.items()
            if t in self.stats
        )

    def widen(self, rounding: ToleranceModel) -> ToleranceModel:
        """Add this noise to the tolerances."""
        wider = {t: self._widen_one(t, tolerance, rounding) for t, tolerance in rounding.tolerances.items()}
        return replace(rounding, tolerances=wider)

    def notes(self, rounding: ToleranceModel) -> list[str]:
        """Describe how two runs of the side differ."""
        tolerances = rounding.tolerances
        different = [t for t, stats in self.stats.items() if tolerances[t].error(stats) > 0.0]
        large = [t for t in different if not self._is_small(t, tolerances[t], rounding)]
        if not different:
            return []
        notes = [
            f"the {self.side} is not deterministic: {len(different)} of {len(self.stats)} tensors differ between two "
            f"runs of it, {different[0]} first; that was added to the tolerances of {len(different) - len(large)}"
        ]
        if large:
            first = tolerances[large[0]]
            notes.append(
                f"two runs of the {self.side} differ by more than rounding explains, first at {large[0]}: by "
                f"{first.error(self.stats[large[0]]):.1e}, where the tolerance is {first.value:.1e}. A race, or random "
                "numbers of its own?"
            )
        return notes

    def _widen_one(self, tensor_id: TensorId, tolerance: Tolerance, rounding: ToleranceModel) -> Tolerance:
        stats = self.stats.get(tensor_id)
        if stats is None or not self._is_small(tensor_id, tolerance, rounding):
            return tolerance
        off = abs(stats.scale - 1.0) if stats.aa else 0.0
        noise = rounding.margin * tolerance.error(stats)
        systematic = 0.0 if tolerance.size else self.systematic.get(tensor_id, 0.0)
        wider = replace(
            tolerance,
            is_repeated=tolerance.is_repeated and stats.dd == 0.0,
            value=tolerance.value + noise,
            scale=tolerance.scale + rounding.scale_margin * off,
            systematic=systematic if systematic > tolerance.value else 0.0,
        )
        return wider.with_term(ToleranceRule.NOISE, noise) if noise else wider

    def _is_small(self, tensor_id: TensorId, tolerance: Tolerance, rounding: ToleranceModel) -> bool:
        return tolerance.error(self.stats[tensor_id]) <= rounding.margin * tolerance.value


def _allow_reordering(tolerance: Tolerance) -> float:
    """Return the error that a different order of sums may cause: about a thousand roundings in fp32, four in bf16.

    Chosen, not measured.
    """
    return math.sqrt(tolerance.floor) / 4


def _measure_systematic(tensor_id: TensorId, noise: Stats, one: Trace, again: Trace, rounding: ToleranceModel) -> float:
    """Measure the relative error that two runs have in common; 0 if it is not known, or may be noise."""
    reference = LogicalTensor.of(rounding.reference, tensor_id)
    assert reference is not None, "it was measured"
    first, second = (LogicalTensor.of(trace, tensor_id, reference.shape) for trace in (one, again))
    if first is None or second is None or second.is_measured or noise.count < TINY:
        return 0.0
    factor, left_out = factor_to_come(tensor_id, rounding.reference, one), rounding.find_noise_dominated(tensor_id)
    ours, theirs = (measure(reference, each, factor=factor, left_out=left_out)[0] for each in (first, second))
    if not (ours.finite_a and ours.finite_b and theirs.finite_b):
        return 0.0
    apart = factor * factor * noise.dd
    common = (ours.dd + theirs.dd - apart) / 2
    # If a single number is noisy, as a clip factor, all errors are parallel to the difference between the two runs.
    across = ours.dd - (ours.dd - common) ** 2 / max(apart, LEAST_DIVISOR)
    squares = min(common, across)
    is_noise = squares < _LEAST_RATIO**2 * apart / 2
    return 0.0 if is_noise else math.sqrt(squares / max(ours.aa, LEAST_DIVISOR))


def _measure_differences(one: Trace, again: Trace, rounding: ToleranceModel) -> Iterator[tuple[TensorId, Stats]]:
    """Measure the difference of every id that both runs and the reference have."""
    for tensor_id in rounding.tolerances:
        reference = LogicalTensor.of(rounding.reference, tensor_id)
        shape = reference.shape if reference is not None else None
        first, second = (LogicalTensor.of(trace, tensor_id, shape) for trace in (one, again))
        if first is None or second is None or first.shape != second.shape:
            continue
        try:
            yield tensor_id, measure(first, second, left_out=rounding.find_noise_dominated(tensor_id))[0]
        except SketchError:
            continue  # it was measured in a different layout
