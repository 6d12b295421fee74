"""Overlapped tensor parallelism: the tensor saved for the backward is a buffer that later layers overwrite.

Transformer Engine gathered the normalised input into a communication buffer that all layers share, and saved the buffer
itself. The last layer is right; every earlier one has its weight's gradient from a later layer's input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.gpt import AllReduce
from zoo.harness.small import small

TE = "https://github.com/NVIDIA/TransformerEngine"


class Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, is_kept: bool, x: torch.Tensor, *linear: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        ctx.kept, ctx.weight = x.clone() if is_kept else buffer, linear[0]
        return F.linear(buffer, *linear)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = grads[0].flatten(0, 1)
        return None, None, grads[0] @ ctx.weight, rows.T @ ctx.kept.flatten(0, 1), rows.sum(0)


def overlapped(candidate: Candidate, *, is_kept: bool) -> None:
    layers = [module_of(candidate, f"layers.{i}.mlp.fc1") for i in range(3)]
    buffer = torch.empty(2, 12, 32)

    def forward(fc1: Any, x: torch.Tensor) -> torch.Tensor:
        x = AllReduce.apply(x, False, True)  # type: ignore[no-untyped-call]
        out: torch.Tensor = Overlapped.apply(buffer, is_kept, x, fc1.weight, fc1.bias)  # type: ignore[no-untyped-call]
        return out

    for fc1 in layers:
        fc1.forward = partial(forward, fc1)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="Transformer Engine 2.0-2.1",
    sources=(f"{TE}/issues/1616", f"{TE}/pull/1554"),
    paper=11,
    case=small("hand"),
    patch=partial(overlapped, is_kept=False),
    clean_patch=partial(overlapped, is_kept=True),
    expected=Expected("layers.0.mlp.fc1", "param_grad", "stale input", line="apply(buffer", operation="Overlapped"),
)
