"""Choice of the tensors that are recorded in full; of the others a sketch is kept.

The reference chooses, and every run that follows it does the same with each id. What a model's parameters will take is
known before the first step. Activations are in full as long as there is room for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ttrace.capture.plan import Plan
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.layouts.ids import Kind, TensorId

_NUM_SIDES = 2
"""Reference and candidate are stored; twins are not."""
_PER_PARAMETER = 5
"""What is recorded of a parameter in a step: before, after, the gradient, and an optimizer's two moments."""


class Detail:
    """Chooses what is recorded in full, as the plan says."""

    def __init__(
        self, plan: Plan, reference: ReferenceTrace, parameters: Iterable[torch.Tensor], num_ranks: int
    ) -> None:
        self._plan = plan
        self._reference = reference
        share = plan.budget // _NUM_SIDES // num_ranks
        needed = plan.num_steps * _PER_PARAMETER * sum(parameter.nbytes for parameter in parameters)
        self._sketches_parameters = needed > share
        self._left = share if self._sketches_parameters else share - needed

    @property
    def may_sketch(self) -> bool:
        """Whether this run's layouts must be known while it runs, because sketches need them."""
        plan = self._plan
        return plan.record == "sketch" or (plan.record == "auto" and self._reference.has_sketches)

    def is_sketched(self, tensor_id: TensorId, local: torch.Tensor) -> bool:
        """Whether a sketch is enough; what other runs replay from the reference is recorded in full."""
        plan, kind = self._plan, tensor_id.kind
        if plan.record == "full" or kind in (Kind.BATCH, Kind.DECISION) or plan.keeps_full(tensor_id.site):
            return False
        if plan.record == "sketch":
            return True
        if plan.reference is not None:
            record = self._reference.record(tensor_id)
            return record is not None and record.sketch is not None
        if kind.is_of_param:
            return self._sketches_parameters
        if local.nbytes > self._left:
            return True
        self._left -= local.nbytes
        return False
