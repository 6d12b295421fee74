"""Data parallelism: the loss is scaled by the number of devices.

transformers divides by the tokens of the whole batch, and its Trainer counted those of one device, or multiplied where
gradients were averaged already: the loss is off by the number of devices.
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
    package="transformers",
    sources=(
        "https://github.com/huggingface/transformers/issues/37474",
        "https://github.com/huggingface/transformers/pull/34373",
    ),
    case=small("ddp", loss=scaled, trusted_loss=loss_of),
    clean_case=small("ddp"),
    expected=Expected(
        ".", "loss", "double reduction", "dp", line="loss_of(logits, labels) * dist.get_world_size()", operation="mul"
    ),
)
