"""Twins take each sum of products in two parts, as a candidate does that is divided over ranks.

A nudge alone does not show how a product rounds: the twin adds up nearly the same terms in the same order, so most of
its rounding is the reference's own. With trained weights nine tenths of it are, and a candidate that adds up parts of
the sum, each rounded by itself, is further from the reference than its twins (docs/decisions/0023-split-sums.md).
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from ttrace.compat import torch as torch_compat

_LEAST_TERMS = 4
_LEAST_BYTES = 4
"""Of a number. The nudge of a shorter one changes the rounding of every product by itself."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HOLDERS = ("DTensor", "Streamed")
"""Tensors that compute with others which they hold, or make."""
_aten = torch.ops.aten


class SplitSums(torch_compat.DispatchMode):
    """While it is entered, matrix products of the forward pass are sums of two products over parts of their terms."""

    def __init__(self, twin: int, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._twin = twin
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in _HOLDERS for kind in types):
            return NotImplemented  # the products of what they hold come here as well
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


@functools.cache  # to seed a generator takes longer than a small product
def _choose_place(twin: int, seed: int, num_terms: int) -> int:
    """Choose where to part a sum; the same place for each length, so that a recomputation repeats itself."""
    return random.Random(f"{seed} {twin} {num_terms}").randint(num_terms // 4, num_terms - num_terms // 4)


_PRODUCTS = {
    _aten.mm.default: _aten.mm.default,
    _aten.addmm.default: _aten.mm.default,
    _aten.bmm.default: _aten.bmm.default,
    _aten.baddbmm.default: _aten.bmm.default,
}
"""Operators whose last two arguments are multiplied, and the product alone."""
