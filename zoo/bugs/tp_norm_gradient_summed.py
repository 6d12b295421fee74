"""Tensor parallelism: the gradient of a norm, already whole on every rank, is summed over them.

With FP8, tensor and context parallelism together the gradients of norms come out tp times too large. The root cause was
never published; a sum where all ranks have the same gives exactly this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import at_gradient
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    def wrong(gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed

    at_gradient(candidate, "layers.1.ffn_norm.weight", wrong)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.WRONG_COMMUNICATION,
    package="Transformer Engine 1.13",
    sources=(
        "https://github.com/NVIDIA/TransformerEngine/issues/1677",
        "https://github.com/NVIDIA/Megatron-LM/issues/1528",
    ),
    paper=14,
    case=small("tp"),
    patch=patch,
    expected=Expected(
        "layers.1.ffn_norm",
        "param_grad",
        "double reduction",
        "tp",
        line="dist.all_reduce(summed)",
        operation="all_reduce",
    ),
)
