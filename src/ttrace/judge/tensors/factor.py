"""Factors that a run's reduction has still to apply.

A correct data-parallel run of two ranks has activation gradients of exactly twice the accumulating reference's, while
its final gradients are equal: dividing by two comes last. Each side states its factor; it is never fitted.
"""

from __future__ import annotations

from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace


def factor_to_come(tensor_id: TensorId, reference: Trace, candidate: Trace) -> float:
    """The factor that the candidate's reduction still applies, relative to the reference's; 1 for final gradients."""
    return candidate.grad_factor / reference.grad_factor if is_before_reduction(tensor_id) else 1.0


def is_before_reduction(tensor_id: TensorId) -> bool:
    """Whether a factor is still to come; the loss that backward starts from needs the same factor as gradients."""
    of_microbatch = tensor_id.kind is Kind.PARAM_GRAD and tensor_id.microbatch is not None
    return tensor_id.kind.is_activation_grad or of_microbatch or tensor_id.kind in (Kind.LOSS, Kind.MAIN_GRAD)


def note_factor(reference: Trace, candidate: Trace) -> list[str]:
    """Note the stated factors if the two sides differ."""
    ours, theirs = reference.grad_factor, candidate.grad_factor
    if ours == theirs:
        return []
    return [
        f"for the comparison, the candidate's loss and activation gradients were multiplied by {theirs / ours:g}: the "
        "reduction of its gradients multiplies by it later"
    ]
