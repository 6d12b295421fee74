"""Tolerances of what an optimizer's step makes of a gradient: updates, parameters after a step, optimizer states.

One step of Adam is about lr x sign(g). If an element's gradient is smaller than its own rounding error, its sign is
arbitrary, and both updates are right. Such an element is *noise-dominated*, and is left out when updates and parameters
after a step are compared (docs/decisions/0003-lost-elements.md). A gradient element that is exactly zero in the
reference and in all twins is not noise-dominated: that row of the embedding was not used, and its update is known.

Elements that are not left out can still be the whole error of an update, and three twins may contain none of them. So
an update has a least error, which is computed from the gradient and not taken from the twins: `UpdateFloors`. Weights
pass it on to what their module computes in later steps (`allow_updated_weights`).

The norm of all gradients, by which they are clipped, is the one sum over everything that a model has. Twins do not show
its rounding, because they add up in the same order and the differences of their gradients average out. On a CPU torch
adds float32 numbers one after the other, so the norm of 10^6 numbers has an error of 1e-5, the norm of 10^8 numbers has
an error of one percent, and less if ranks hold parts of them
(tests/judge/tolerance/test_updates.py::test_norms_of_many_numbers_are_off). The error of the reference's own norm is
known: its gradients are recorded, and are summed in float64 here. A sum in a tree has a small error, which varies by
chance; for such sums there is a minimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.errors import SketchError
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.tensors.values import Values
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.verdict import Tolerance, ToleranceRule
from ttrace.layouts.ids import MAIN_PARAM, Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.reader import Trace
from ttrace.trace.twin_stats import NOISE_DOMINATED
from ttrace.values.stats import Stats

_ELEMENT_NOISE = 3.0
"""How much larger the rounding error of a single element may be than the rms of all. Chosen, not measured."""
_LARGEST_ELEMENT = 6.0
"""The largest element of a parameter in units of the rms, where only a sketch is known.

Chosen, not measured: of 10^9 normally distributed numbers, the largest is about 6 times their rms.
"""
_LEAST_NORM_ERROR = 1 / 64
"""In units of u and the root of the number of elements (docs/explanation/tolerance.md)."""
_LARGEST_NORM_ERROR = 1 / 200
"""In units of u and the number of elements: twice what was seen. A number that is further off is a different norm."""
_NORM_SHARES = {Kind.GRAD_NORM: 1.0, Kind.CLIP: 1.0, Kind.UPDATE: 1.0, Kind.OPTIM: 2.0}
"""How often the norm's error enters what is clipped by it: optimizer states have squares of gradients."""


class NoiseDominatedElements:
    """The elements of a parameter whose update, in any step so far, rounding alone decides."""

    def __init__(self, gradients: Sequence[_Gradient]) -> None:
        self._gradients = gradients

    def __call__(self, region: Region) -> torch.Tensor:
        """Mark those elements in a region of the parameter."""
        mask = torch.zeros(region.local_shape, dtype=torch.bool, device="cpu")
        for gradient in self._gradients:
            mask |= gradient.mark_noise(region)
        return mask

    def is_everything(self) -> bool:
        """Whether the parameter has no other elements."""
        values = self._gradients[0].values
        return all(bool(self(values.make_region(bounds)).all()) for bounds in values.cut())


@dataclass(frozen=True)
class _Gradient:
    values: Values
    twins: Sequence[Values]
    """The twins' gradients; of a twin that was measured instead of recorded, only what is zero in the reference."""
    limit: float
    """Elements up to this size are within their rounding error."""

    def mark_noise(self, region: Region) -> torch.Tensor:
        """Mark the elements of a region that are within their error, and not zero in the reference and all twins."""
        values = self.values.read_region(region)
        small = values.abs() <= self.limit
        if not small.any():
            return small
        used = values != 0
        for twin in self.twins:
            used |= twin.read_region(region) != 0
        return small & used


def find_noise_dominated(
    reference: Trace, twins: Sequence[Trace], tensor_id: TensorId, noise: Mapping[TensorId, float]
) -> NoiseDominatedElements | None:
    """Find the noise-dominated elements of a parameter, at any step so far.

    `noise` is the rounding error of an element of each gradient. None if the tensor has no gradient of which all values
    are known: a sketch has no single elements.
    """
    ids = (TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD) for step in range(_find_last_update(tensor_id) + 1))
    try:
        gradients = [_read_gradient(reference, twins, each, noise[each]) for each in ids if each in noise]
    except SketchError:
        return None
    return NoiseDominatedElements(gradients) if gradients else None


def _read_gradient(reference: Trace, twins: Sequence[Trace], tensor_id: TensorId, noise: float) -> _Gradient:
    gradient = LogicalTensor.of(reference, tensor_id)
    assert gradient is not None, "its noise was measured"
    others = [twin for trace in twins if (twin := LogicalTensor.of(trace, tensor_id)) is not None]
    used = [twin.find_used() for twin in others if twin.shape == gradient.shape]
    return _Gradient(Values(gradient), [Values(twin) for twin in used if twin is not None], NOISE_DOMINATED * noise)


def _find_last_update(tensor_id: TensorId) -> int:
    """Find the last step whose update is in this tensor; -1 for none."""
    if tensor_id.is_of_update:
        return tensor_id.step
    return tensor_id.step - 1 if tensor_id.kind is Kind.PARAM else -1


class UpdateFloors:
    """The least errors of updates and of what they change, before the margin.

    This is how far rounding of the gradient may move single elements, relative to the norm of the tensor. An update's
    error is also at least 2 u x the largest element of the parameter after the step, relative to the update's norm: the
    step rounds to a new parameter, and one element may be rounded the other way.
    """

    def __init__(self, reference: Trace, noise: Mapping[TensorId, float]) -> None:
        """Set up for a reference; `noise` is the rounding error of an element of each gradient."""
        self._reference = reference
        self._noise = noise
        self._moved: dict[TensorId, float] = {}
        """By gradient: the parameter after its step and in later steps needs it again."""

    def measure(self, tensor_id: TensorId, logical: LogicalTensor, norm: float) -> float:
        """Measure the error that single elements can cause in a tensor of this norm."""
        if not norm:
            return 0.0
        if logical.num_buckets:
            return self._measure_flip(tensor_id) / norm
        # All steps so far have moved a parameter after a step, and all steps before it a parameter at its begin.
        steps = (tensor_id.step,) if tensor_id.kind is Kind.UPDATE else range(_find_last_update(tensor_id) + 1)
        moved = math.hypot(*(self._measure_moved(tensor_id, step) for step in steps)) / norm
        return max(moved, self._measure_rounding(tensor_id) / norm if tensor_id.kind is Kind.UPDATE else 0.0)

    def _measure_moved(self, tensor_id: TensorId, step: int) -> float:
        """Measure how far rounding of its gradient moves a parameter's update at a step."""
        gradient_id = TensorId.of(step, tensor_id.microbatch, tensor_id.name, Kind.PARAM_GRAD, call=tensor_id.call)
        noise = self._noise.get(gradient_id, 0.0)
        if noise and gradient_id not in self._moved:
            self._moved[gradient_id] = _measure_moved_norm(self._reference, gradient_id, noise)
        return self._moved.get(gradient_id, 0.0)

    def _measure_flip(self, tensor_id: TensorId) -> float:
        """Measure one element with the opposite update, or rounded the other way: a sketch leaves no element out."""
        step = tensor_id.step - (tensor_id.kind is Kind.PARAM)
        update = LogicalTensor.of(self._reference, tensor_id.at(Kind.UPDATE, slot="")._replace(step=step))
        if update is None:
            return 0.0
        after = LogicalTensor.of(self._reference, tensor_id.at(Kind.PARAM_AFTER, slot="")._replace(step=step))
        norm = measure(update, update)[0].norm
        if after is not None:
            norm = max(norm, unit(after.dtype) * _LARGEST_ELEMENT * measure(after, after)[0].norm)
        return 2.0 * norm / math.sqrt(math.prod(update.shape))

    def _measure_rounding(self, tensor_id: TensorId) -> float:
        """Measure one element of a parameter that is rounded the other way after its update."""
        after = LogicalTensor.of(self._reference, tensor_id.at(Kind.PARAM_AFTER))
        if after is None:
            return 0.0
        return 2 * unit(self._reference.shards[tensor_id][0].record.dtype) * _find_largest(after)


def _measure_moved_norm(reference: Trace, tensor_id: TensorId, noise: float) -> float:
    """Measure how far rounding of a gradient may move the elements of its update that depend on its size.

    Adam's updates all have the same size, except where a gradient comes near Adam's own epsilon. There the update is
    proportional to the gradient, and a single element that is barely not noise-dominated can be the whole error of an
    update (docs/decisions/0003-lost-elements.md).
    """
    gradient = LogicalTensor.of(reference, tensor_id.at(Kind.PARAM_GRAD, slot=""))
    update = LogicalTensor.of(reference, tensor_id.at(Kind.UPDATE, slot=""))
    if gradient is None or update is None or gradient.shape != update.shape or not math.prod(update.shape):
        return 0.0
    sizes, moves, total = Values(gradient), Values(update), 0.0
    usual = moves.read_elements(moves.spread_index()).abs().median()
    for bounds in moves.cut():
        moved = moves.read(bounds).abs_()
        share = (_ELEMENT_NOISE * noise / sizes.read(bounds).abs_()).nan_to_num(0.0, 0.0).clamp(max=1.0)
        proportional = (1 - moved / usual).nan_to_num(0.0).clamp(min=0.0)
        total += float((moved * share * proportional).square().sum())
    return math.sqrt(total)


def _find_largest(tensor: LogicalTensor) -> float:
    """Find the largest magnitude of an element."""
    values = Values(tensor)
    if values.is_one_block and len(tensor.pieces) == 1 and values.count:
        whole = tensor.pieces[0].tensor()
        # Magnitudes are exact in any dtype, but torch does not compute them for dtypes of eight bits.
        is_supported = whole.dtype.is_floating_point and whole.dtype.itemsize > 1
        return float((whole if is_supported else whole.to(torch.float64)).abs().max())
    return max((float(values.read(bounds).abs_().max()) for bounds in values.cut()), default=0.0)


def allow_updated_weights(tolerances: Mapping[TensorId, Tolerance]) -> dict[TensorId, Tolerance]:
    """In later steps, widen a module's tolerance to the error of its weights (its own and its direct children's).

    That error may come from a few elements of a weight, and three twins may contain none of them
    (docs/decisions/0023-split-sums.md).
    """
    of_weights: dict[tuple[int, str], float] = {}
    for tensor_id, tolerance in tolerances.items():
        if tensor_id.kind is Kind.PARAM and tensor_id.step:
            terms = (term.value for term in tolerance.terms if term.rule is ToleranceRule.UPDATE)
            largest = max(terms, default=0.0)
            module = tensor_id.name.rpartition(".")[0]
            for place in ((tensor_id.step, module), (tensor_id.step, module.rpartition(".")[0])):
                of_weights[place] = max(of_weights.get(place, 0.0), largest)
    result = dict(tolerances)
    for tensor_id, tolerance in tolerances.items():
        least = of_weights.get((tensor_id.step, tensor_id.name), 0.0)
        if tensor_id.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) and least > tolerance.value:
            result[tensor_id] = replace(tolerance, value=least).with_term(ToleranceRule.UPDATE, least)
    return result


def allow_squares(
    tolerances: Mapping[TensorId, Tolerance], stats: Mapping[TensorId, Sequence[Stats]]
) -> dict[TensorId, Tolerance]:
    """Allow an optimizer's state twice the tolerance of its gradients: their squares have twice their error.

    Few elements decide the error of a square, and three twins of a norm's 16 elements may happen to be close together.
    """
    result = dict(tolerances)
    for tensor_id, tolerance in tolerances.items():
        if tensor_id.kind is Kind.OPTIM and tensor_id.site.slot != MAIN_PARAM:
            ids = (TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD) for step in range(tensor_id.step + 1))
            # The step's number, which is a state too, has fewer elements than the gradient.
            gradients = [tolerances[t] for t in ids if t in tolerances and _are_alike(stats[t], stats[tensor_id])]
            least = max((2.0 * gradient.value for gradient in gradients if not gradient.size), default=0.0)
            if least > tolerance.value:
                result[tensor_id] = replace(tolerance, value=least).with_term(ToleranceRule.SQUARES, least)
    return result


def _are_alike(one: Sequence[Stats], other: Sequence[Stats]) -> bool:
    """Whether two tensors have the same number of elements."""
    return {stats.count for stats in one} == {stats.count for stats in other}


def measure_norm_error(norm: float, squares: float, numel: int) -> float:
    """Estimate the relative error that rounding may give a norm of `numel` numbers with this sum of squares."""
    u = unit(torch.float32)  # 16-bit numbers are summed in float32, too
    own = abs(norm / math.sqrt(squares) - 1.0) if squares > 0.0 and math.isfinite(norm + squares) else 0.0
    return max(_LEAST_NORM_ERROR * math.sqrt(numel) * u, own if own <= _LARGEST_NORM_ERROR * numel * u else 0.0)


def find_norm_share(tensor_id: TensorId) -> float:
    """Find how often the norm's error enters a tensor; 0 for a parameter, which is not clipped."""
    return 0.0 if tensor_id.site.slot == MAIN_PARAM else _NORM_SHARES.get(tensor_id.kind, 0.0)
