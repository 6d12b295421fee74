"""Elements of a parameter whose update rounding alone decides.

One step of Adam is about lr x sign(g): an element whose gradient is smaller than the error that its gradient may have
can be updated either way, and both are right. Such elements are left out when parameters after a step are compared.
A gradient that is exactly zero in the reference and in all twins is different: that row of the embedding was not used,
and its update is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.values import Values
from ttrace.judge.verdict import Tolerance, ToleranceRule
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.reader import Trace
from ttrace.trace.twin_stats import LOST

_TAIL = 3.0
"""How much more a single element may err than all do on average."""


class LostElements:
    """The elements of a parameter whose gradient, at any step so far, rounding alone decides."""

    def __init__(self, gradients: Sequence[_Gradient]) -> None:
        self._gradients = gradients

    def __call__(self, region: Region) -> torch.Tensor:
        """Mark those of a region of the parameter."""
        mask = torch.zeros(region.local_shape, dtype=torch.bool, device="cpu")
        for gradient in self._gradients:
            mask |= gradient.find_small(region)
        return mask

    def is_everything(self) -> bool:
        values = self._gradients[0].values
        return all(bool(self(values.make_region(bounds)).all()) for bounds in values.cut())


@dataclass(frozen=True)
class _Gradient:
    values: Values
    twins: Sequence[Values]
    """What is zero only where a twin's gradient is."""
    noise: float
    """How large an element is that rounding may turn around."""

    def find_small(self, region: Region) -> torch.Tensor:
        """Which elements of a region rounding could turn around: those that the reference or any twin has at all."""
        values = self.values.read_region(region)
        small = values.abs() <= self.noise
        if not small.any():
            return small
        used = values != 0
        for twin in self.twins:
            used |= twin.read_region(region) != 0
        return small & used


def find_lost_elements(
    reference: Trace, twins: Sequence[Trace], tensor_id: TensorId, noise: Mapping[TensorId, float]
) -> LostElements | None:
    """Find the elements whose gradient, at any step so far, rounding may turn around; None if there is no gradient.

    `noise` is how large rounding makes an element of a gradient.
    """
    gradients = []
    for step in range(_find_last_update(tensor_id) + 1):
        gradient_id = TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD)
        gradient = LogicalTensor.of(reference, gradient_id)
        if gradient is not None and gradient_id in noise:
            others = [twin for trace in twins if (twin := LogicalTensor.of(trace, gradient_id)) is not None]
            used = [twin.find_used() for twin in others if twin.shape == gradient.shape]
            same = [Values(twin) for twin in used if twin is not None]
            gradients.append(_Gradient(Values(gradient), same, LOST * noise[gradient_id]))
    return LostElements(gradients) if gradients else None


def measure_swayed_norm(reference: Trace, tensor_id: TensorId, noise: float) -> float:
    """Measure how far rounding of a gradient may move the elements of its update that depend on its size.

    Adam's updates are of one size, except where a gradient comes near Adam's own epsilon: there it goes with the
    gradient, and a single element that is barely not lost can be the whole error of an update.
    """
    gradient = LogicalTensor.of(reference, tensor_id.at(Kind.PARAM_GRAD, slot=""))
    update = LogicalTensor.of(reference, tensor_id.at(Kind.UPDATE, slot=""))
    if gradient is None or update is None or gradient.shape != update.shape or not math.prod(update.shape):
        return 0.0
    sizes, moves, total = Values(gradient), Values(update), 0.0
    usual = moves.read_elements(moves.spread_index()).abs().median()
    for bounds in moves.cut():
        moved = moves.read(bounds).abs_()
        share = (_TAIL * noise / sizes.read(bounds).abs_()).nan_to_num(0.0, 0.0).clamp(max=1.0)
        follows = (1 - moved / usual).nan_to_num(0.0).clamp(min=0.0)
        total += float((moved * share * follows).square().sum())
    return math.sqrt(total)


def allow_updated_weights(tolerances: Mapping[TensorId, Tolerance]) -> dict[TensorId, Tolerance]:
    """Allow what a module computes in later steps the error that its weights have by then, its own and the next inner.

    It may come from a few elements of a weight, of which three twins may happen to have none.
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


def _find_last_update(tensor_id: TensorId) -> int:
    """The last step whose update is in this tensor; -1 for none."""
    if tensor_id.is_of_update:
        return tensor_id.step
    return tensor_id.step - 1 if tensor_id.kind is Kind.PARAM else -1
