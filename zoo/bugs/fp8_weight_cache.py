"""FP8 with recomputation: from the second microbatch on, a cached cast of the weight is read that was never filled.

Transformer Engine casts a weight once a step. Without gradients, as in the first pass of recomputation, the cast was
bound to a temporary object and the cache stayed as it was: fresh memory, or the weights of an earlier step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE, module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small

TE = "https://github.com/NVIDIA/TransformerEngine"
NAME = "layers.1.feed_forward.w2"


def cast(weight: torch.Tensor) -> torch.Tensor:
    return weight + (weight.to(torch.float8_e4m3fn).to(weight.dtype) - weight).detach()


def quantise(model: nn.Module) -> None:
    linear = model.get_submodule(NAME)
    linear.forward = lambda x: F.linear(x, cast(linear.weight))  # type: ignore[arg-type]  # it is a tensor


def cached(candidate: Candidate, *, is_filled: bool) -> None:
    linear = module_of(candidate, NAME)
    cache, calls = torch.zeros_like(linear.weight), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            calls.append(1)
        if len(calls) > 1:
            return F.linear(x, linear.weight + (cache - linear.weight).detach())
        if is_filled:
            cache.data.copy_(cast(linear.weight))
        return F.linear(x, cast(linear.weight))

    linear.forward = forward


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="Transformer Engine up to 1.3",
    sources=(f"{TE}/issues/539", f"{TE}/pull/646"),
    paper=8,
    case=small("ddp", recompute="full", shape=replace(SHAPE, adapt=quantise)),
    patch=partial(cached, is_filled=False),
    clean_patch=partial(cached, is_filled=True),
    expected=Expected(NAME, "output", "zeros", line="linear.weight + (cache - linear.weight)", operation="linear"),
)
