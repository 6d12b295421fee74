"""Context parallelism: the backward of attention reads a gradient as if it lay in order.

Transformer Engine's ring attention handed a gradient that is a transposed view to a fused kernel, which reads memory in
its own order. The forward is right; the gradients of queries, keys and values are not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.context import gathered_attention
from zoo.harness.small import small


class Kernel(torch.autograd.Function):
    """Reads the memory of a gradient in order, whatever its strides are."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, is_in_order: bool) -> torch.Tensor:
        ctx.is_in_order = is_in_order
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        dout = grads[0].contiguous() if ctx.is_in_order else grads[0]
        return torch.as_strided(dout, dout.shape, torch.empty(dout.shape).stride()), None


def attend(candidate: Candidate, *, is_in_order: bool) -> None:
    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Kernel.apply(gathered_attention(*qkv), is_in_order)  # type: ignore[no-untyped-call]
        return out

    module_of(candidate, "layers.2.attention").attend = attention


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="Transformer Engine up to 2.1",
    sources=(
        "https://github.com/NVIDIA/TransformerEngine/issues/1557",
        "https://github.com/NVIDIA/TransformerEngine/pull/1539",
    ),
    paper=13,
    case=small("cp-gather"),
    patch=partial(attend, is_in_order=False),
    clean_patch=partial(attend, is_in_order=True),
    expected=Expected("layers.2.attention", "grad_input", "transposed", line="Kernel.apply(", operation="Kernel"),
)
