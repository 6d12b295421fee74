"""Tensor parallelism: all ranks draw their shards of a weight from one seed, so the shards are the same.

ms-swift initialised layers that Megatron-core cuts over tp with one seed on all ranks. The weight of the whole layer
then repeats, and training has to break the symmetry. Generated values replace these weights in a traced step.
"""

from __future__ import annotations

import torch
from torch import nn

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    torch.manual_seed(7)
    nn.init.normal_(module_of(candidate, "layers.0.mlp.fc1").weight, std=0.02)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="ms-swift",
    sources=("https://github.com/modelscope/ms-swift/pull/7944", "https://github.com/InternLM/InternLM/pull/405"),
    case=small("hand"),
    patch=patch,
    is_early=True,
    expected=Expected("layers.0.mlp.fc1", "param", "same seed", "tp"),
)
