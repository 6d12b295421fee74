"""Model of what rounding explains in a reference: the tolerance of every tensor.

The error of a tensor b is ||b - a|| / ||a||, where a is the reference's. A twin is a second run of the reference that
differs from it by rounding only. A tensor is wrong if its error is larger than its tolerance, which is

    margin x max(twins, pooled, floor, norm, update)    for most tensors,
    margin x max(siblings, floor)                       for a gradient that is mathematically zero, whose error is
                                                        measured in units of its siblings,
    0                                                   for integers,

then at least `squares` for an optimizer's state, and at least the `update` of its weights for what a module computes in
later steps. If a second run of a side differs from the first, `noise` is added. Where only sketches are known, the
errors of twins are widened by the error of the sketch. The terms, by their `ToleranceRule`:

    twins     largest error of the twins                                         twins.py: estimate_tolerances
    pooled    the same, pooled over all tensors of a kind below 16 elements      twins.py: estimate_tolerances
    floor     u = eps / 2 of the weakest dtype that was used so far              twins.py: estimate_tolerances
    norm      rounding of the norm of all gradients, for what is clipped by it   updates.py: measure_norm_error
    update    single elements of an update that rounding may move                updates.py: UpdateFloors
    siblings  rounding error, in units of the gradient's siblings                zero_gradients.py: measure_by_siblings
    squares   twice the tolerance of the gradient                                updates.py: allow_squares
    noise     margin x the difference between two runs of one side               run_to_run.py: Noise.widen
    scale     limit of |<a, b> / <a, a> - 1|, which is judged apart              scale.py: add_scale

The margin is 4 (margin.py); only the scale has a margin of its own. `ttrace explain` prints the terms of one tensor.
Why it is done this way, and how good the estimate is: docs/explanation/tolerance.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ttrace.judge.compatibility import check_twin
from ttrace.judge.engine import HERE, Engine, OnProgress, make_lots
from ttrace.judge.margin import MARGIN
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.tolerance.scale import SCALE_MARGIN, add_scale
from ttrace.judge.tolerance.twins import TINY, TwinSample, estimate_tolerances, unit
from ttrace.judge.tolerance.updates import (
    NoiseDominatedElements,
    UpdateFloors,
    allow_squares,
    allow_updated_weights,
    find_noise_dominated,
    find_norm_share,
    measure_norm_error,
)
from ttrace.judge.tolerance.zero_gradients import mark_followers, measure_by_siblings, measure_rounding_of_terms
from ttrace.judge.verdict import Tolerance, ToleranceRule, ToleranceTerm
from ttrace.layouts.ids import Kind, TensorId, is_inside
from ttrace.trace.reader import Trace
from ttrace.values.sketch import estimate_uncertainty
from ttrace.values.stats import Stats, measure_rms

_SKETCH_SIGMAS = 4.0
"""By how many standard deviations of a sketch's own error the errors of twins are widened. Chosen, not measured.

The standard deviation itself is tested: tests/values/test_sketch.py::test_norms_are_told_as_well_as_promised.
"""
OUTLYING = 1e3
"""How many times further off than the others a twin must be, to count as damaged.

Chosen, not measured (docs/explanation/tolerance.md); KINKED tells such a twin from one that crossed a kink.
"""
KINKED = 30.0
"""How many times further off a twin is in the tensors around, if it crossed a kink.

A float8 cast in one twin of a float32 model made one gradient 7,000 times as uncertain as the other twins show, the
gradients next to it 1,000 times, and all that followed 30 to 100 times.
"""
_HARMLESS = 1e-3
"""A twin's error below this hides little, whatever its reason. Chosen, not measured."""

AllStats = Mapping[TensorId, tuple[Stats, ...]]
"""Each twin compared with the reference, by id."""


@dataclass(frozen=True)
class ToleranceModel:
    """What rounding explains in a reference, by id."""

    reference: Trace
    twins: Sequence[Trace]
    margin: float
    tolerances: Mapping[TensorId, Tolerance]
    stats: AllStats
    noise: Mapping[TensorId, float]
    """The rounding error of an element of each gradient."""

    @classmethod
    def measure(
        cls,
        reference: Trace,
        twins: Sequence[Trace],
        margin: float = MARGIN,
        *,
        engine: Engine = HERE,
        progress: OnProgress | None = None,
    ) -> ToleranceModel:
        """Compare every twin with the reference, and estimate the tolerance of each tensor.

        Gradients are measured first, because what follows from them needs their noise and the error of their norm.
        """
        for twin in twins:
            check_twin(twin, reference)
        samples: dict[TensorId, TwinSample] = {}
        stats: dict[TensorId, tuple[Stats, ...]] = {}
        sizes = {tensor_id: reference.num_bytes(tensor_id) for tensor_id in reference.shards}
        done, total = 0, sum(sizes.values())

        def measure_all(ids: Sequence[TensorId], comparer: TwinComparer) -> None:
            nonlocal done
            for sample, found in engine.map(TwinComparer.samples, comparer, make_lots(ids, sizes.__getitem__)):
                samples[sample.id], stats[sample.id] = sample, found
                done += sizes[sample.id]
                if progress is not None:
                    progress(done, total)

        gradients = [t for t in reference.shards if t.kind is Kind.PARAM_GRAD]
        others = [t for t in reference.shards if t.kind is not Kind.PARAM_GRAD]
        measure_all(gradients, TwinComparer(reference, twins))
        noise = _measure_noise(reference, samples, stats)
        # Before the others are measured: a worker that iterated over `stats` would see it grow.
        norm_errors = _measure_norm_errors(reference, stats)
        measure_all(others, TwinComparer(reference, twins, noise, norm_errors))
        in_order = [samples[t] for t in reference.shards if t in samples]
        return cls(reference, twins, margin, _estimate(reference, in_order, stats, margin), stats, noise)

    @property
    def identity(self) -> str:
        """A text that differs whenever a result of this model may differ."""
        return f"{_identify(self.reference, self.twins)} {self.margin} {self.tolerances}"

    @property
    def scale_margin(self) -> float:
        """The margin of scales; a user who widens the margin widens both."""
        return _find_scale_margin(self.margin)

    def find_noise_dominated(self, tensor_id: TensorId) -> NoiseDominatedElements | None:
        """Find the elements to leave out of a comparison; None if there are none, or if only sketches are known."""
        return find_noise_dominated(self.reference, self.twins, tensor_id, self.noise)


@dataclass(frozen=True)
class TwinComparer:
    """Compares all twins with their reference, tensor by tensor."""

    reference: Trace
    twins: Sequence[Trace]
    noise: Mapping[TensorId, float] = field(default_factory=dict)
    """The rounding error of an element of each gradient; empty while gradients are measured."""
    norm_errors: Mapping[int, float] = field(default_factory=dict)
    """By step, the relative error that the norm of all gradients may have."""

    @property
    def identity(self) -> str:
        """A text that differs whenever a sample may differ: all else here is measured in these traces."""
        return _identify(self.reference, self.twins)

    def samples(self, ids: Sequence[TensorId]) -> list[tuple[TwinSample, tuple[Stats, ...]]]:
        """Measure ids one by one, and free what reading them took."""
        samples = []
        for tensor_id in ids:
            sample = self._sample(tensor_id)
            if sample is not None:
                samples.append(sample)
            for trace in (self.reference, *self.twins):
                trace.release(tensor_id)
        return samples

    @cached_property
    def _update_floors(self) -> UpdateFloors:
        return UpdateFloors(self.reference, self.noise)

    def _sample(self, tensor_id: TensorId) -> tuple[TwinSample, tuple[Stats, ...]] | None:
        logical = LogicalTensor.of(self.reference, tensor_id)
        if logical is None:
            return None
        left_out = find_noise_dominated(self.reference, self.twins, tensor_id, self.noise)
        measured, num_read = list[Stats](), 0
        for twin in self.twins:
            if (stats := _read_measured(twin, tensor_id, logical)) is not None:
                measured.append(stats)
                continue
            other = LogicalTensor.of(twin, tensor_id, logical.shape)
            if other is not None and other.shape == logical.shape:
                measured.append(measure(logical, other, left_out=left_out)[0])
                num_read += 1
        if self.twins and not measured:
            return None  # nothing shows what rounding explains here
        wider = 1.0 + _SKETCH_SIGMAS * estimate_uncertainty(logical.num_buckets) if logical.num_buckets else 1.0
        errors = tuple(stats.error * wider for stats in measured)
        # A twin that was read here has the reference's norm in its stats, if no elements were left out.
        is_norm_known = left_out is None and num_read > 0 and measured[-1].finite_a and measured[-1].finite_b
        floors = self._measure_floors(tensor_id, logical, measured[-1].norm if is_norm_known else None)
        dtype = self.reference.shards[tensor_id][0].record.dtype
        return TwinSample(tensor_id, math.prod(logical.shape), dtype, errors, floors), tuple(measured)

    def _measure_floors(
        self, tensor_id: TensorId, logical: LogicalTensor, norm: float | None
    ) -> tuple[ToleranceTerm, ...]:
        """Measure the errors of a tensor that twins may not show; `norm` is its norm if it is known."""
        floors = []
        if tensor_id.is_of_update or (tensor_id.kind is Kind.PARAM and tensor_id.step > 0):
            norm = measure(logical, logical)[0].norm if norm is None else norm
            error = self._update_floors.measure(tensor_id, logical, norm)
            floors.append(ToleranceTerm(ToleranceRule.UPDATE, error))
        if error := find_norm_share(tensor_id) * self.norm_errors.get(tensor_id.step, 0.0):
            floors.append(ToleranceTerm(ToleranceRule.NORM, error))
        return tuple(floors)


def describe_outlying_twins(rounding: ToleranceModel) -> Iterator[str]:
    """Describe the twins that are far off in a tensor while nothing near it is.

    Every twin is nudged by the same amount, so the errors of all twins are similar. A twin with an error that is orders
    of magnitude larger may have crossed a kink, as a ReLU or a cast to float8 has; then the tensors that follow have
    larger errors too. A twin with such an error in one tensor alone is damaged: its tolerance would hide any bug in
    that tensor.
    """
    excesses_of: dict[int, dict[TensorId, float]] = {}
    for tensor_id, stats in rounding.stats.items():
        if len(stats) == len(rounding.twins) and _is_comparable(tensor_id, stats, rounding):
            twin, excess = _find_worst(tensor_id, stats, rounding)
            if excess >= KINKED:
                excesses_of.setdefault(twin, {})[tensor_id] = excess
    for twin, excesses in sorted(excesses_of.items()):
        far = [t for t in excesses if excesses[t] >= OUTLYING and rounding.stats[t][twin].error >= _HARMLESS]
        around = [t for t in excesses if rounding.stats[t][twin].count >= TINY]  # small ones are far off by chance
        alone = [t for t in far if not any(_is_beside(other, t) for other in around)]
        if alone:
            errors = [s.error for s in rounding.stats[alone[0]]]
            others = max(error for number, error in enumerate(errors) if number != twin)
            more = f" The same holds for {len(alone) - 1} more tensors of this twin." if len(alone) > 1 else ""
            yield (
                f"{rounding.twins[twin].folder}: {alone[0]} is {errors[twin]:.1e} from the reference, where the other "
                f"twins are at most {others:.1e} from it, and nothing beside it is. This twin's trace is damaged, or "
                f"its run went wrong. Trace it again.{more}"
            )


def _identify(reference: Trace, twins: Sequence[Trace]) -> str:
    return str([trace.identity for trace in (reference, *twins)])


def _find_scale_margin(margin: float) -> float:
    return SCALE_MARGIN * margin / MARGIN


def _estimate(
    reference: Trace, samples: Sequence[TwinSample], stats: AllStats, margin: float
) -> dict[TensorId, Tolerance]:
    """Estimate all tolerances, as the module's docstring says; `samples` are in the reference's order."""
    estimated = estimate_tolerances(samples, margin=margin)

    def rounding_of_terms(tensor_id: TensorId) -> float:
        return measure_rounding_of_terms(tensor_id, reference, stats, estimated)

    tolerances = measure_by_siblings(estimated, stats, margin=margin, rounding_of_terms=rounding_of_terms)
    tolerances = mark_followers(tolerances, stats, margin=margin)
    tolerances = allow_updated_weights(allow_squares(tolerances, stats))
    return add_scale(tolerances, stats, margin=_find_scale_margin(margin))


def _measure_noise(reference: Trace, samples: Mapping[TensorId, TwinSample], stats: AllStats) -> dict[TensorId, float]:
    """Measure the rounding error of an element of each gradient: the twins' relative error times the rms."""
    noise = {}
    for tensor_id, sample in samples.items():
        whole = stats[tensor_id][:1]
        if not whole:
            logical = LogicalTensor.of(reference, tensor_id)
            assert logical is not None, "it was measured"
            whole = (measure(logical, logical)[0],)
        noise[tensor_id] = max([*sample.twin_errors, unit(sample.dtype)]) * measure_rms(whole[0].aa, whole[0].count)
    return noise


def _measure_norm_errors(reference: Trace, stats: AllStats) -> dict[int, float]:
    """Measure by step, from the stats of gradients, the relative error that the norm of them all may have."""
    errors = {}
    for tensor_id in reference.shards:
        norm = LogicalTensor.of(reference, tensor_id) if tensor_id.kind is Kind.GRAD_NORM else None
        if norm is not None:
            final = (t for t in stats if t.kind is Kind.PARAM_GRAD and t.microbatch is None)
            gradients = [stats[t][0] for t in final if t.step == tensor_id.step and stats[t]]
            squares, numel = sum(s.aa for s in gradients), sum(s.count for s in gradients)
            errors[tensor_id.step] = measure_norm_error(float(norm.tensor()), squares, numel)
    return errors


def _read_measured(twin: Trace, tensor_id: TensorId, like: LogicalTensor) -> Stats | None:
    """Read the stats of a tensor that was measured as a whole. This is the usual case, and needs no values."""
    shards = twin.shards.get(tensor_id, ())
    if len(shards) != 1 or shards[0].record.stats is None:
        return None
    return shards[0].record.stats if shards[0].record.shape == like.shape else None


def _is_comparable(tensor_id: TensorId, stats: Sequence[Stats], rounding: ToleranceModel) -> bool:
    """Whether all twins are about as far off here. A step may flip the update of single elements in one twin alone."""
    is_stepped = tensor_id.kind is Kind.OPTIM or tensor_id.is_of_update
    is_known = len(stats) > 2 or (len(stats) == 2 and stats[0].count >= TINY)
    tolerance = rounding.tolerances.get(tensor_id)
    return tolerance is not None and tolerance.floor > 0.0 and is_known and not is_stepped


def _find_worst(tensor_id: TensorId, stats: Sequence[Stats], rounding: ToleranceModel) -> tuple[int, float]:
    """Find the twin that is furthest off, and how many times as far as the others are."""
    errors = [s.error for s in stats]
    worst = max(range(len(errors)), key=errors.__getitem__)
    others = statistics.median(error for number, error in enumerate(errors) if number != worst)
    is_size_known = stats[worst].aa > 0.0 or not stats[worst].finite_b
    if not is_size_known or math.isinf(others):
        return worst, 0.0
    return worst, errors[worst] / max(others, rounding.tolerances[tensor_id].floor)


def _is_beside(other: TensorId, tensor_id: TensorId) -> bool:
    """Whether a tensor has a different name, but is inside the module around this one, in the same step."""
    module = tensor_id.name.rpartition(".")[0] if tensor_id.kind.is_of_param else tensor_id.name
    around = module.rpartition(".")[0]
    is_another = other.name != tensor_id.name and other.step == tensor_id.step
    return is_another and (not around or is_inside(other.name, around))
