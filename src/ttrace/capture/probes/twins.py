"""Probe that nudges a twin's inputs, and sums of products in two parts.

A twin is a run of the reference whose rounding differs. Its distance from the reference shows how far rounding alone
moves each tensor. A nudge of the inputs is not enough for that: the twin adds up nearly the same terms in the same
order, so most of its rounding errors equal the reference's, about 90% with trained weights. A candidate that adds up
parts of a sum, and rounds each part by itself, is then further from the reference than the twins. So a twin takes each
sum of products in two parts as well (docs/decisions/0023-split-sums.md).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch

from ttrace.adapters.adapter import Adapter
from ttrace.capture.probes.probe import Visit
from ttrace.compat import torch as torch_compat
from ttrace.layouts.ids import Kind
from ttrace.layouts.region import Region
from ttrace.values.generate import Normal, generate_values
from ttrace.values.stats import LEAST_DIVISOR, has_few_values

NUDGE = 2.0
"""The norm of a twin's nudge relative to the tensor's norm, in units of u = eps / 2."""


class ReplaceValues(torch.autograd.Function):
    """Autograd function with other values in the forward pass and the same gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        # The tensor is made here and not passed as an argument: autograd makes a returned argument a view of itself,
        # and pipelines that free what they have sent refuse views.
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def replace_tensor(original: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return other values in place of a tensor, attached to its graph and with its Python attributes."""
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

    def __init__(
        self, twin: int, seed: int, adapter: Adapter, *, isolated: bool = False, has_embeddings: bool = False
    ) -> None:
        self._twin = twin
        self._seed = seed
        self._adapter = adapter
        self._isolated = isolated
        self._keeps_masks = has_embeddings and not isolated
        """Whether masks are not nudged: a script multiplies them by -1e4 or more, and so the nudge. The outputs of
        embeddings are nudged then."""

    def visit(self, visit: Visit) -> torch.Tensor | None:
        here = visit.enters_module if self._isolated else visit.entry
        if not here or not visit.tensor.is_floating_point():
            return None
        local = self._adapter.to_local(visit.tensor).detach()
        if self._keeps_masks and visit.id.kind is Kind.INPUT and has_few_values(local):
            return None
        # A tensor with values that are not finite is not nudged. `where`, not `if`: reading the answer would wait for
        # the device.
        nudged = torch.where(local.isfinite().all(), self._nudge(visit, local), local)
        return replace_tensor(visit.tensor, self._adapter.with_local(visit.tensor, nudged))

    def _nudge(self, visit: Visit, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's values, each nudged as on all ranks that hold it; padding is not nudged."""
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
        length = NUDGE * unit * exact.norm() / direction.to(torch.float64).norm().clamp_min(LEAST_DIVISOR)
        nudged: torch.Tensor = (exact + direction * length).to(local.dtype)
        return nudged


_LEAST_TERMS = 4
"""The shortest sum that is taken in two parts."""
_LEAST_BYTES = 4
"""The size of the smallest numbers whose sums are taken in two parts. The nudge of smaller ones changes the rounding of
every product by itself."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HOLDERS = ("DTensor", "Streamed")
"""Types of tensors that compute with tensors which they hold, or make."""
_aten = torch.ops.aten


class SplitSums(torch_compat.DispatchMode):
    """While it is entered, matrix products of the forward pass are sums of two products over parts of their terms."""

    def __init__(self, twin: int, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._twin = twin
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in _HOLDERS for kind in types):
            return NotImplemented  # the products of the tensors that they hold come here as well
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func) if all(kind in _PLAIN for kind in types) else None
        # A backward pass has no gradients of its own; a recomputation has, and repeats the forward pass.
        if product is None or (torch_compat.is_in_backward() and not torch.is_grad_enabled()):
            return func(*args, **kwargs)
        left, right = args[-2:]
        num_terms = left.shape[-1]
        if num_terms < _LEAST_TERMS or left.dtype.itemsize < _LEAST_BYTES or not left.is_floating_point():
            return func(*args, **kwargs)
        at = _choose_place(self._twin, self._seed, num_terms)
        first = func(*args[:-2], left[..., :at], right[..., :at, :], **kwargs)
        return first.add_(product(left[..., at:], right[..., at:, :]), alpha=kwargs.get("alpha", 1))


@functools.cache  # seeding a generator takes longer than a small product
def _choose_place(twin: int, seed: int, num_terms: int) -> int:
    """Choose where to divide a sum; the same place for each length, so that a recomputation repeats the forward."""
    return random.Random(f"{seed} {twin} {num_terms}").randint(num_terms // 4, num_terms - num_terms // 4)


_PRODUCTS = {
    _aten.mm.default: _aten.mm.default,
    _aten.addmm.default: _aten.mm.default,
    _aten.bmm.default: _aten.bmm.default,
    _aten.baddbmm.default: _aten.bmm.default,
}
"""Operators whose last two arguments are multiplied, and the product alone."""
