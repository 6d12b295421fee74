"""Context parallelism: the loss is multiplied by the number of ranks, and nothing divides that out again.

`loss_func` of Megatron-LM did so for gradients that are averaged over the context-parallel ranks; with
`calculate_per_token_loss` they are not. All gradients and their norm are too large by cp; Adam hides it, but for
clipping and weight decay.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import loss_of
from zoo.harness.small import small


def scaled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss_of(logits, labels) * dist.get_world_size()


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="Megatron-LM before 0c2cd58",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/673",),
    paper=3,
    case=small("cp-gather", loss=scaled, trusted_loss=loss_of),
    clean_case=small("cp-gather"),
    expected=Expected(
        ".", "loss", "double reduction", "cp", line="loss_of(logits, labels) * dist.get_world_size()", operation="mul"
    ),
)
