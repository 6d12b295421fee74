"""Elements of a parameter whose update rounding alone decides.

One step of Adam is about lr x sign(g): an element whose gradient is smaller than the error that its gradient may have
can be updated either way, and both are right. Such elements are left out when parameters after a step are compared.
A gradient that is exactly zero in the reference and in all twins is different: that row of the embedding was not used,
and its update is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Tolerance, ToleranceRule
from ttrace.tensors.ids import MAIN_PARAM, Kind, TensorId
from ttrace.tensors.region import Region
from ttrace.trace.reader import Trace

_TAIL = 3.0
"""How much more a single element may err than all do on average."""

Masks = Mapping[Region, torch.Tensor]
"""By the reference's regions: which elements to leave out."""
NONE_LOST: Masks = {}


def find_lost_elements(
    reference: Trace, twins: Sequence[Trace], tensor_id: TensorId, noise: Mapping[TensorId, float]
) -> Masks:
    """Find the elements whose gradient, at any step so far, was within its noise (relative to its rms)."""
    small = list(_find_small_gradients(reference, twins, tensor_id, noise))
    parameter = LogicalTensor.of(reference, tensor_id) if small else None
    masks: dict[Region, torch.Tensor] = {}
    for piece in parameter.pieces if parameter else ():
        mask = torch.zeros(piece.region.local_shape, dtype=torch.bool, device="cpu")
        # Gradients may be sharded in another way than the parameter is.
        for region, elements in small:
            for here, there in piece.region.overlaps(region):
                here.assign(mask, here.of(mask) | there.of(elements))
        masks[piece.region] = mask
    return masks


def is_of_update(tensor_id: TensorId) -> bool:
    """Whether this is a parameter after its step, the model's own or the optimizer's, or what the step did to it."""
    is_main = tensor_id.kind is Kind.OPTIM and tensor_id.site.slot == MAIN_PARAM
    return is_main or tensor_id.kind in (Kind.UPDATE, Kind.PARAM_AFTER)


def measure_swayed_norm(reference: Trace, tensor_id: TensorId, error: float) -> float:
    """Measure how far rounding of a gradient may move the elements of its update that depend on its size.

    Adam's updates are of one size, except where a gradient comes near Adam's own epsilon: there it goes with the
    gradient, and a single element that is barely not lost can be the whole error of an update.
    """
    gradient = LogicalTensor.of(reference, tensor_id.at(Kind.PARAM_GRAD, slot=""))
    update = LogicalTensor.of(reference, tensor_id.at(Kind.UPDATE, slot=""))
    if gradient is None or update is None:
        return 0.0
    total = 0.0
    for piece in update.pieces:
        for other in gradient.pieces:
            if other.region == piece.region and piece.region.numel:
                sizes, moved = other.tensor().double().abs(), piece.tensor().double().abs()
                share = (_TAIL * error * sizes.square().mean().sqrt() / sizes).nan_to_num(0.0, 0.0).clamp(max=1.0)
                follows = (1 - moved / moved.median()).nan_to_num(0.0).clamp(min=0.0)
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


def _find_small_gradients(
    reference: Trace, twins: Sequence[Trace], tensor_id: TensorId, noise: Mapping[TensorId, float]
) -> Iterator[tuple[Region, torch.Tensor]]:
    """For every region of every gradient so far: which of its elements rounding could turn around."""
    for step in range(_find_last_update(tensor_id) + 1):
        gradient_id = TensorId.of(step, None, tensor_id.name, Kind.PARAM_GRAD)
        gradient = LogicalTensor.of(reference, gradient_id)
        if gradient is None or gradient_id not in noise:
            continue
        others = [twin for trace in twins if (twin := LogicalTensor.of(trace, gradient_id)) is not None]
        for piece in gradient.pieces:
            values = piece.tensor().to(torch.float64).abs()
            small = values <= noise[gradient_id] * values.square().mean().sqrt()
            yield piece.region, small & _is_used(piece.region, values, others)


def _is_used(region: Region, values: torch.Tensor, twins: Sequence[LogicalTensor]) -> torch.Tensor:
    """Which elements the reference or any twin has a gradient for."""
    used = values != 0
    for twin in twins:
        for piece in twin.pieces:
            if piece.region == region:
                used = used | (piece.tensor() != 0)
    return used


def _find_last_update(tensor_id: TensorId) -> int:
    """The last step whose update is in this tensor; -1 for none."""
    if is_of_update(tensor_id):
        return tensor_id.step
    return tensor_id.step - 1 if tensor_id.kind is Kind.PARAM else -1
