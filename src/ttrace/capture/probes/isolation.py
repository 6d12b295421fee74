"""Isolation of modules from one another, so that each is judged alone.

The inputs of a module are replaced by generated values with the mean and spread of the reference's inputs, and so are
the gradients of its outputs. The arriving values are recorded before that: if they are wrong while the modules that
made them are right, the code between the modules is at fault. Tables and masks, which no gradient goes through, are
replayed from the reference, because random numbers would destroy them; integers are not changed. Before the optimizer
steps, the final gradients are replaced too.

Discrete decisions, such as a router's top-k, are replayed from the reference in twins and candidates (`Decisions`).
There rounding may change a choice: a token that goes to a different expert changes everything after it, and that is not
a bug. So these runs use the reference's choice. Their own choice is recorded, with the scores that it was made by.
"""

from __future__ import annotations

import math

import torch

from ttrace.adapters.adapter import Adapter
from ttrace.capture.plan import Plan
from ttrace.capture.probes.probe import Visit
from ttrace.capture.probes.twins import replace_tensor
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import Placement
from ttrace.values.generate import Distribution, Normal, Signed, generate_values


class Isolate:
    """Probe that replaces what enters modules.

    The isolated reference decides the distributions; its twins and candidates read them from its trace.
    """

    def __init__(self, plan: Plan, adapter: Adapter, resolver: LayoutResolver, reference: ReferenceTrace) -> None:
        self._plan = plan
        self._adapter = adapter
        self._resolver = resolver
        self._reference = reference
        self._not_isolated: dict[str, None] = {}

    def distribution(self, tensor_id: TensorId) -> Distribution | None:
        """Return the distribution that this tensor is generated from; None if it is not generated."""
        first = tensor_id.first
        if first.kind is Kind.INPUT and self._reference.record(first.at(Kind.GRAD_INPUT)) is None:
            return None
        if first.kind not in (Kind.INPUT, Kind.GRAD_OUTPUT, Kind.PARAM_GRAD):
            return None
        if self._plan.role != "reference":
            return self._reference.distribution(first)
        moments = self._reference.moments(first)
        return None if moments is None else _choose_distribution(first.kind, *moments)

    def visit(self, visit: Visit) -> torch.Tensor | None:
        if not visit.tensor.is_floating_point():
            return None
        if visit.enters_module:
            return self._generate(visit) if visit.values is not None else self._replay(visit)
        if visit.id.kind is Kind.OUTPUT and visit.tensor.requires_grad:
            # A new tensor: the output of an inner module is often the outer module's too, and each has a gradient.
            return replace_tensor(visit.tensor, visit.tensor.detach().clone())
        return None

    def replace_gradient(
        self, tensor_id: TensorId, gradient: torch.Tensor, placement: Placement, source: Distribution
    ) -> None:
        """Put generated values into a final gradient."""
        with torch.no_grad():
            self._adapter.to_local(gradient).copy_(self._generate_values(tensor_id, gradient, placement, source))

    def notes(self) -> list[str]:
        """Return a note about the sites that could not be isolated, if any."""
        sites = list(self._not_isolated)
        return (
            [f"{len(sites)} sites could not be isolated: no layout is known, the first is {sites[0]}"] if sites else []
        )

    def _generate(self, visit: Visit) -> torch.Tensor | None:
        assert visit.values is not None
        placement = visit.placement or self._resolver.infer(visit.id.first, visit.tensor)
        if placement is None:
            self._not_isolated[str(visit.id.site)] = None
            return None
        local = self._generate_values(visit.id.first, visit.tensor, placement, visit.values)
        if visit.id.kind is Kind.GRAD_OUTPUT:
            local = local / self._plan.grad_factor
        return replace_tensor(visit.tensor, self._adapter.with_local(visit.tensor, local))

    def _replay(self, visit: Visit) -> torch.Tensor | None:
        if visit.id.kind is Kind.GRAD_OUTPUT:
            return None  # it is zero in the reference
        placement = visit.placement or self._resolver.infer(visit.id.first, visit.tensor)
        full = self._reference.tensor(visit.id.first) if placement is not None and not placement.pending else None
        if placement is None or full is None or placement.region.local_shape != tuple(visit.tensor.shape):
            return None
        # With the tensor's own strides: a slice of the whole could not be viewed in a different shape. And with its
        # graph: a module that returns its input unchanged has no gradient of its own there.
        return replace_tensor(visit.tensor, torch.empty_like(visit.tensor.detach()).copy_(placement.region.take(full)))

    def _generate_values(
        self, tensor_id: TensorId, like: torch.Tensor, placement: Placement, source: Distribution
    ) -> torch.Tensor:
        """Generate this rank's local values; the first rank has all of a pending sum, and padding is zero."""
        local = torch.zeros_like(self._adapter.to_local(like).detach())
        if any(self._adapter.coord[axis] for axis in placement.pending):
            return local
        inner = local[tuple(slice(size) for size in placement.region.local_shape)]
        values = generate_values(
            tensor_id,
            placement.region,
            dtype=like.dtype,
            distribution=source,
            seed=self._plan.seed,
            device=local.device,
        )
        inner.copy_(values)
        return local


def _choose_distribution(kind: Kind, mean: float, size: float) -> Distribution:
    """Choose a distribution with this mean and root mean square.

    Values for final gradients are not close to zero, where updates of optimizers such as Adam jump.
    """
    if kind is Kind.PARAM_GRAD:
        return Signed(size)
    spread = math.sqrt(max(size**2 - mean**2, 0.0))
    return Normal(mean, spread or abs(mean))


_AGREEMENT = 0.5
"""The least share of rows in which a run's own choices equal the reference's. Rounding changes few choices; if fewer
agree, the reference's choices are of different rows."""


class Decisions:
    """The reference's choices, for this rank's rows."""

    def __init__(self, resolver: LayoutResolver, reference: ReferenceTrace) -> None:
        self._resolver = resolver
        self._reference = reference

    def replay(self, tensor_id: TensorId, own: torch.Tensor, placement: Placement | None) -> torch.Tensor | None:
        """Return what the reference chose here, or the run's own choice if the reference's is of different rows.

        None if the reference's choice is unknown.
        """
        full = self._reference.tensor(tensor_id)
        placement = placement or self._resolver.infer(tensor_id, own)
        if full is None or placement is None:
            return None
        region = placement.region
        if region.shape != tuple(full.shape) or region.local_shape != tuple(own.shape):
            return None
        chosen = region.take(full).to(own.device, own.dtype, non_blocking=True)
        same = (chosen.sort(-1).values == own.sort(-1).values).all(-1) if own.ndim else chosen == own
        return torch.where(same.to(torch.float32).mean() >= _AGREEMENT, chosen, own)
