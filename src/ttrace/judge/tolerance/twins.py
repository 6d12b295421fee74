"""Estimates of the error that rounding alone explains, tensor by tensor, from the twins.

The tolerance is margin x max(error of the twins, floor): model.py has the whole formula. The floor is the relative
error of one rounding, u = eps / 2, in the weakest dtype that the reference has used so far. Tensors of fewer than 16
elements have too few degrees of freedom to be estimated alone, so their twins' errors are pooled over all tensors of
their kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ttrace.judge.margin import MARGIN
from ttrace.judge.verdict import Tolerance, ToleranceRule, ToleranceTerm
from ttrace.layouts.ids import Kind, TensorId

TINY = 16
"""Tensors with fewer elements are pooled. Chosen, not measured (docs/explanation/tolerance.md)."""
ZERO_ERROR = 0.3
"""Twins with an error this large show nothing about the tensor: it is zero but for rounding. Chosen, not measured."""


@dataclass(frozen=True)
class TwinSample:
    """What the reference and its twins show about one id."""

    id: TensorId
    numel: int
    dtype: torch.dtype
    twin_errors: tuple[float, ...]
    floors: tuple[ToleranceTerm, ...] = ()
    """The least errors that this tensor has besides those of the twins, before the margin."""


def estimate_tolerances(samples: Iterable[TwinSample], *, margin: float = MARGIN) -> dict[TensorId, Tolerance]:
    """Estimate the tolerance of every id; `samples` are in the reference's order of appearance."""
    samples = list(samples)
    pooled = _pool_errors(samples)
    result, weakest = {}, 0.0
    for sample in samples:
        if not sample.dtype.is_floating_point:
            result[sample.id] = Tolerance(0.0, 0.0, 0.0)
            continue
        weakest = max(weakest, unit(sample.dtype))
        twin_error = max(sample.twin_errors, default=0.0)
        terms = [
            ToleranceTerm(ToleranceRule.TWINS, margin * twin_error),
            ToleranceTerm(ToleranceRule.FLOOR, margin * weakest),
        ]
        if sample.numel < TINY:
            terms.append(ToleranceTerm(ToleranceRule.POOLED, margin * pooled[sample.id.kind]))
            twin_error = max(twin_error, pooled[sample.id.kind])
        floor = max([weakest, *(term.value for term in sample.floors)])
        terms += [ToleranceTerm(term.rule, margin * term.value) for term in sample.floors]
        result[sample.id] = Tolerance(margin * max(twin_error, floor), twin_error, floor, terms=tuple(terms))
    return result


def unit(dtype: torch.dtype) -> float:
    """Return u = eps / 2: the largest relative error of one rounding."""
    return float(torch.finfo(dtype).eps) / 2


def is_zero(sample_errors: tuple[float, ...]) -> bool:
    """Whether twins with these errors show that a tensor is zero but for rounding."""
    return bool(sample_errors) and max(sample_errors) >= ZERO_ERROR


def replica_tolerance(
    tensor_id: TensorId, tolerance: Tolerance, dtype: torch.dtype, *, is_reduced: bool = False
) -> float:
    """Return how far replicas may differ.

    Parameters after a step may not differ at all, because they would drift apart. Final gradients that a framework has
    reduced along the axis of the replicas may not differ either, because they are copies of one sum. Other replicas of
    a final gradient were computed and rounded in the same way, so their own dtype counts, and not a weaker one before
    it.
    """
    if tensor_id.kind is Kind.PARAM_AFTER:
        return 0.0
    is_final = tensor_id.kind is Kind.PARAM_GRAD and tensor_id.microbatch is None
    if not is_final or not tolerance.is_repeated or not dtype.is_floating_point:
        return tolerance.value
    return 0.0 if is_reduced else tolerance.value * min(1.0, unit(dtype) / tolerance.floor)


def _pool_errors(samples: list[TwinSample]) -> Mapping[Kind, float]:
    """Find for each kind the largest error of the twins over its tiny tensors, without those that are zero."""
    result: dict[Kind, float] = {}
    for sample in samples:
        if sample.numel < TINY and not is_zero(sample.twin_errors):
            result[sample.id.kind] = max(result.get(sample.id.kind, 0.0), *sample.twin_errors, 0.0)
    return {kind: result.get(kind, 0.0) for kind in Kind}
