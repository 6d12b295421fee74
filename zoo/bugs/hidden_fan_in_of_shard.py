"""Tensor parallelism: row-parallel layers compute the spread of their initial values from their own shard.

Megatron-Bridge initialised adapters with xavier on each shard, so that with four ranks their weights began with twice
the standard deviation, and the loss to which training converges depended on the number of ranks. Here the row-parallel
layers of the small GPT do so. Generated values replace these weights in a traced step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    torch.manual_seed(dist.get_rank())
    for layer in range(3):
        for name in ("attention.proj", "mlp.fc2"):
            row = module_of(candidate, f"layers.{layer}.{name}")
            nn.init.kaiming_uniform_(row.weight, a=5**0.5)  # its fan-in is that of the shard


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="Megatron-Bridge",
    sources=(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5840",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5843",
    ),
    case=small("hand"),
    patch=patch,
    is_early=True,
    expected=Expected("layers.0.attention.proj", "param", "fan-in of a shard"),
)
