"""Tensor parallelism: a parameter that all ranks share starts from different values.

NeMo Automodel initialised what is not cut after the ranks' random streams had parted, and nothing broadcast it: copies
of one weight differ from the start, and drift.
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
    torch.manual_seed(10 + dist.get_rank())
    nn.init.normal_(module_of(candidate, "layers.2.attention_norm").weight, mean=1.0, std=0.02)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.RANDOM,
    package="NeMo Automodel",
    sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/3822",),
    case=small("tp", own_parameters=True),
    patch=patch,
    is_early=True,
    expected=Expected(
        "layers.2.attention_norm",
        "param",
        "replicas differ",
        "tp",
        line="nn.init.normal_(module_of",
        operation="normal_",
    ),
)
