"""Model of what rounding explains: the twins measured against the reference, and the tolerances that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ttrace.errors import SketchError
from ttrace.judge.compatibility import check_twin
from ttrace.judge.engine import HERE, Engine, OnProgress, make_lots
from ttrace.judge.margin import MARGIN
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.tensors.values import Values
from ttrace.judge.tolerance.grad_norm import find_norm_share, measure_norm_error
from ttrace.judge.tolerance.gradient_terms import measure_rounding_of_terms
from ttrace.judge.tolerance.scale import SCALE_MARGIN, add_scale
from ttrace.judge.tolerance.twins import TwinSample, estimate_tolerances, unit
from ttrace.judge.tolerance.updates import (
    LostElements,
    allow_updated_weights,
    find_lost_elements,
    measure_swayed_norm,
)
from ttrace.judge.tolerance.zero_gradients import mark_followers, measure_by_siblings
from ttrace.judge.verdict import Tolerance, ToleranceRule, ToleranceTerm
from ttrace.layouts.ids import MAIN_PARAM, Kind, TensorId
from ttrace.trace.reader import Trace
from ttrace.values.sketch import estimate_uncertainty
from ttrace.values.stats import Stats

_NUM_SIGMAS = 4.0
"""By how many of a sketch's own errors its twins' are widened."""
_BIGGEST = 6.0
"""How much larger than most the largest element of a parameter is taken to be, where only a sketch is known."""


@dataclass
class ToleranceModel:
    """What rounding explains in a reference, by id."""

    reference: Trace
    twins: Sequence[Trace]
    margin: float = MARGIN
    tolerances: dict[TensorId, Tolerance] = field(default_factory=dict)
    stats: dict[TensorId, tuple[Stats, ...]] = field(default_factory=dict)
    """Each twin against the reference, by id."""
    _noise: dict[TensorId, float] = field(default_factory=dict)
    _swayed: dict[TensorId, float] = field(default_factory=dict)
    """By gradient, what was measured of its update: the parameter after it and in later steps ask again."""
    _norm_errors: dict[int, float] = field(default_factory=dict)
    """By step, how far off the norm of all gradients may be."""

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
        """Compare every twin with the reference, and estimate the tolerance of each tensor."""
        for twin in twins:
            check_twin(twin, reference)
        model = cls(reference, twins, margin)
        samples = model._collect(engine, progress)
        model.tolerances = model._estimate([samples[t] for t in reference.shards if t in samples])
        return model

    def _collect(self, engine: Engine, progress: OnProgress | None) -> dict[TensorId, TwinSample]:
        """Measure all tensors of the twins; gradients first, because the others need their noise."""
        gradients = [t for t in self.reference.shards if t.kind is Kind.PARAM_GRAD]
        others = [t for t in self.reference.shards if t.kind is not Kind.PARAM_GRAD]
        known: dict[TensorId, TwinSample] = {}
        sizes = {tensor_id: self.reference.num_bytes(tensor_id) for tensor_id in self.reference.shards}
        done, total = 0, sum(sizes.values())
        for ids in (gradients, others):
            if ids is others:  # before others are measured: those who measure them must not see `stats` grow
                self._norm_errors = self._measure_norm_errors()
            for sample, stats in engine.map(ToleranceModel._samples, self, make_lots(ids, sizes.__getitem__)):
                known[sample.id] = sample
                done += sizes[sample.id]
                if progress is not None:
                    progress(done, total)
                self.stats[sample.id] = stats
                if sample.id.kind is Kind.PARAM_GRAD:
                    relative = max([*sample.twin_errors, unit(sample.dtype)])
                    self._noise[sample.id] = relative * self._measure_rms(sample.id)
        return known

    def _estimate(self, samples: Sequence[TwinSample]) -> dict[TensorId, Tolerance]:
        found = estimate_tolerances(samples, margin=self.margin)

        def rounding_of_terms(tensor_id: TensorId) -> float:
            return measure_rounding_of_terms(tensor_id, self.reference, self.stats, found)

        proven = measure_by_siblings(found, self.stats, margin=self.margin, rounding_of_terms=rounding_of_terms)
        proven = mark_followers(proven, self.stats, margin=self.margin)
        allowed = allow_updated_weights(self._allow_squares(proven))
        return add_scale(allowed, self.stats, margin=self.scale_margin)

    @property
    def identity(self) -> str:
        """Differs as soon as what is made of it may."""
        traces = [trace.identity for trace in (self.reference, *self.twins)]
        return f"{traces} {self.margin} {self.tolerances}"

    @property
    def scale_margin(self) -> float:
        """The margin of scales: whoever widens one margin widens both."""
        return SCALE_MARGIN * self.margin / MARGIN

    def find_lost(self, tensor_id: TensorId) -> LostElements | None:
        """Find the elements to leave out of a comparison of this id; none where only sketches are known."""
        if not self._noise:
            return None  # no gradient was measured
        try:
            return find_lost_elements(self.reference, self.twins, tensor_id, self._noise)
        except SketchError:
            return None

    def _allow_squares(self, tolerances: dict[TensorId, Tolerance]) -> dict[TensorId, Tolerance]:
        """Allow an optimizer's state at least what squares of gradients have that would pass.

        Few elements of a square count: three twins of a norm's 16 may happen to be close together.
        """
        result = dict(tolerances)
        for tensor_id, tolerance in tolerances.items():
            if tensor_id.kind is Kind.OPTIM and tensor_id.site.slot != MAIN_PARAM:
                made_of = (
                    TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD) for step in range(tensor_id.step + 1)
                )
                known = [tolerances[t] for t in made_of if t in tolerances and self._are_alike(t, tensor_id)]
                least = max((2.0 * gradient.value for gradient in known if not gradient.size), default=0.0)
                if least > tolerance.value:
                    result[tensor_id] = replace(tolerance, value=least).with_term(ToleranceRule.SQUARES, least)
        return result

    def _are_alike(self, a: TensorId, b: TensorId) -> bool:
        """Whether both have as many elements: a step's number has one."""
        return {s.count for s in self.stats[a]} == {s.count for s in self.stats[b]}

    def _samples(self, ids: Sequence[TensorId]) -> list[tuple[TwinSample, tuple[Stats, ...]]]:
        found = []
        for tensor_id in ids:
            sample = self._sample(tensor_id)
            if sample is not None:
                found.append(sample)
            for trace in (self.reference, *self.twins):
                trace.release(tensor_id)
        return found

    def _sample(self, tensor_id: TensorId) -> tuple[TwinSample, tuple[Stats, ...]] | None:
        logical = LogicalTensor.of(self.reference, tensor_id)
        if logical is None:
            return None
        lost, found, num_read = self.find_lost(tensor_id), list[Stats](), 0
        for twin in self.twins:
            if (stats := _read_measured(twin, tensor_id, logical)) is not None:
                found.append(stats)
                continue
            other = LogicalTensor.of(twin, tensor_id, logical.shape)
            if other is not None and other.shape == logical.shape:
                found.append(measure(logical, other, lost=lost)[0])
                num_read += 1
        if self.twins and not found:
            return None  # nothing says what rounding explains here
        wider = 1.0 + _NUM_SIGMAS * estimate_uncertainty(logical.num_buckets) if logical.num_buckets else 1.0
        errors = [stats.error * wider for stats in found]
        dtype = self.reference.shards[tensor_id][0].record.dtype
        follows_update = tensor_id.is_of_update or (tensor_id.kind is Kind.PARAM and tensor_id.step > 0)
        floors = []
        if follows_update:
            # A twin's stats say this of the reference too, if no elements were left out.
            is_known = lost is None and num_read and found[-1].finite_a and found[-1].finite_b
            norm = (found[-1] if is_known else measure(logical, logical)[0]).norm
            floors.append(ToleranceTerm(ToleranceRule.UPDATE, self._measure_update_floor(tensor_id, logical, norm)))
        if share := find_norm_share(tensor_id):
            floors.append(ToleranceTerm(ToleranceRule.NORM, share * self._norm_errors.get(tensor_id.step, 0.0)))
        return TwinSample(tensor_id, math.prod(logical.shape), dtype, tuple(errors), tuple(floors)), tuple(found)

    def _measure_norm_errors(self) -> dict[int, float]:
        """Measure from the gradients' stats, by step, how far off the norm of them all may be."""
        found = {}
        for tensor_id in self.reference.shards:
            norm = LogicalTensor.of(self.reference, tensor_id) if tensor_id.kind is Kind.GRAD_NORM else None
            if norm is not None:
                final = (t for t in self.stats if t.kind is Kind.PARAM_GRAD and t.microbatch is None)
                stats = [self.stats[t][0] for t in final if t.step == tensor_id.step and self.stats[t]]
                numel = sum(s.count for s in stats)
                found[tensor_id.step] = measure_norm_error(float(norm.tensor()), sum(s.aa for s in stats), numel)
        return found

    def _measure_update_floor(self, tensor_id: TensorId, logical: LogicalTensor, norm: float) -> float:
        """What single elements may do to a step: three twins may happen to show nothing of it."""
        if logical.num_buckets:
            return self._measure_turned(tensor_id, norm)
        # A parameter has been moved by all steps so far, and at the begin of a step by those before it.
        last = tensor_id.step - (tensor_id.kind is Kind.PARAM)
        steps = (last,) if tensor_id.kind is Kind.UPDATE else range(last + 1)
        swayed = math.hypot(*(self._measure_swayed(tensor_id, step) for step in steps)) / norm if norm else 0.0
        return max(swayed, self._measure_quantum(tensor_id, norm) if tensor_id.kind is Kind.UPDATE else 0.0)

    def _measure_rms(self, tensor_id: TensorId) -> float:
        """The size of a gradient's elements: of all that it has, its twins' stats tell it."""
        found = self.stats[tensor_id]
        if not found:
            logical = LogicalTensor.of(self.reference, tensor_id)
            assert logical is not None, "it was measured"
            found = (measure(logical, logical)[0],)
        return found[0].norm / math.sqrt(max(found[0].count, 1))

    def _measure_swayed(self, tensor_id: TensorId, step: int) -> float:
        """What rounding of its gradient does to single elements of a parameter's update at a step."""
        if not self._noise:
            return 0.0
        gradient_id = TensorId.of(step, tensor_id.microbatch, tensor_id.name, Kind.PARAM_GRAD, call=tensor_id.call)
        noise = self._noise.get(gradient_id, 0.0)
        if noise and gradient_id not in self._swayed:
            self._swayed[gradient_id] = measure_swayed_norm(self.reference, gradient_id, noise)
        return self._swayed.get(gradient_id, 0.0)

    def _measure_turned(self, tensor_id: TensorId, norm: float) -> float:
        """What one element does whose update turns around, or is rounded the other way: sketches leave none out."""
        step = tensor_id.step - (tensor_id.kind is Kind.PARAM)
        update = LogicalTensor.of(self.reference, tensor_id.at(Kind.UPDATE, slot="")._replace(step=step))
        if update is None or not norm:
            return 0.0
        after = LogicalTensor.of(self.reference, tensor_id.at(Kind.PARAM_AFTER, slot="")._replace(step=step))
        quantum = unit(after.dtype) * _BIGGEST * measure(after, after)[0].norm if after is not None else 0.0
        turned = max(measure(update, update)[0].norm, quantum)
        return 2.0 * turned / math.sqrt(math.prod(update.shape)) / norm

    def _measure_quantum(self, tensor_id: TensorId, norm: float) -> float:
        """What one element that is rounded the other way does to an update of this norm: twins may have none."""
        after = LogicalTensor.of(self.reference, tensor_id.at(Kind.PARAM_AFTER))
        if after is None:
            return 0.0
        biggest = _find_biggest(after)
        dtype = self.reference.shards[tensor_id][0].record.dtype
        return 2 * unit(dtype) * biggest / norm if norm else 0.0


def _find_biggest(tensor: LogicalTensor) -> float:
    """Find the largest magnitude of an element."""
    values = Values(tensor)
    if values.is_one_block and len(tensor.pieces) == 1 and values.count:
        whole = tensor.pieces[0].tensor()
        # Magnitudes are exact in any dtype, but torch takes none of eight bits.
        is_taken = whole.dtype.is_floating_point and whole.dtype.itemsize > 1
        return float((whole if is_taken else whole.to(torch.float64)).abs().max())
    return max((float(values.read(bounds).abs_().max()) for bounds in values.cut()), default=0.0)


def _read_measured(twin: Trace, tensor_id: TensorId, like: LogicalTensor) -> Stats | None:
    """Read the stats of a tensor that was measured whole: most are, and need not be put together."""
    shards = twin.shards.get(tensor_id, ())
    if len(shards) != 1 or shards[0].record.stats is None:
        return None
    return shards[0].record.stats if shards[0].record.shape == like.shape else None
