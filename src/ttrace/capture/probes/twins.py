"""Probe that nudges a twin's inputs, and the function by which probes replace tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ttrace.adapters.adapter import Adapter
from ttrace.capture.probes.probe import Visit
from ttrace.layouts.region import Region
from ttrace.values.generate import Normal, generate_values

NUDGE = 2.0
"""A twin's nudge in units of u = eps / 2, relative to the tensor's norm."""


class ReplaceValues(torch.autograd.Function):
    """Autograd function with other values in the forward pass and the same gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        # The tensor is made here and is no argument: an argument that is returned becomes a view of itself, and
        # pipelines that free what they have sent refuse views.
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def replace_tensor(original: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return other values in place of a tensor, attached to its own graph and with what was noted on it."""
    result: torch.Tensor = other
    if original.requires_grad:
        result = ReplaceValues.apply(original, lambda: other)  # type: ignore[no-untyped-call]  # torch's own
    if type(original) is torch.Tensor:
        vars(result).update(vars(original))
    return result


class Perturb:
    """Probe that nudges floating-point numbers by machine epsilon in a random direction.

    It nudges them where they enter the model or, in isolation, where they enter any module, forward or backward.
    """

    def __init__(self, twin: int, seed: int, adapter: Adapter, *, isolated: bool = False) -> None:
        self._twin = twin
        self._seed = seed
        self._adapter = adapter
        self._isolated = isolated

    def visit(self, visit: Visit) -> torch.Tensor | None:
        here = visit.enters_module if self._isolated else visit.entry
        if not here or not visit.tensor.is_floating_point():
            return None
        local = self._adapter.to_local(visit.tensor).detach()
        # Values that are not finite stay; whether there are any, only the device knows.
        nudged = torch.where(local.isfinite().all(), self._nudge(visit, local), local)
        return replace_tensor(visit.tensor, self._adapter.with_local(visit.tensor, nudged))

    def _nudge(self, visit: Visit, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's values, each nudged as on all ranks that hold it; padding stays."""
        region = visit.placement.region if visit.placement else Region.whole(tuple(local.shape))
        direction = torch.zeros_like(local, dtype=torch.float32)
        inner = direction[tuple(slice(size) for size in region.local_shape)]
        noise = generate_values(
            f"nudge {self._twin} {visit.id.first}",
            region,
            dtype=torch.float32,
            distribution=Normal(),
            seed=self._seed,
            device=local.device,
        )
        inner.copy_(noise.view(inner.shape))
        unit = torch.finfo(local.dtype).eps / 2
        exact = local.to(torch.float64)
        length = NUDGE * unit * exact.norm() / direction.to(torch.float64).norm().clamp_min(1e-300)
        nudged: torch.Tensor = (exact + direction * length).to(local.dtype)
        return nudged
