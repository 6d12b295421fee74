"""Mixture of experts: each rank draws its router from a random stream of its own.

The weights of Megatron-core's router, and of the gate of shared experts, came from the stream of the data-parallel
rank. Nothing makes them equal afterwards, so ranks route by different weights.
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
    nn.init.normal_(module_of(candidate, "layers.1.feed_forward.router").weight)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.RANDOM,
    package="megatron-core 0.5.0-0.9.0",
    sources=("https://github.com/NVIDIA/Megatron-LM/commits/core_v0.10.0/megatron/core/transformer/moe/router.py",),
    case=small("ep", own_parameters=True),
    patch=patch,
    is_early=True,
    expected=Expected(
        "layers.1.feed_forward.router",
        "param",
        "replicas differ",
        "ep",
        line="nn.init.normal_(module_of",
        operation="normal_",
    ),
)
