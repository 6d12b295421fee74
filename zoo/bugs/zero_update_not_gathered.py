"""Sharded optimizer: the updated shard of one bucket never arrives at the other ranks.

Megatron-LM gathers the buckets of parameters one after the other while the forward runs. The hook of a bucket whose
gather was not dispatched yet returned silently, and its layer ran with the values of the step before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import parameter_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    optimizer: Any = candidate.optimizer
    weight = parameter_of(candidate, "layers.2.feed_forward.w1.weight")
    before, gather = weight.detach().clone(), optimizer._sync_params
    is_owner = optimizer._param_to_rank[weight] == dist.get_rank()

    def wrong() -> None:
        gather()
        if not is_owner:
            with torch.no_grad():
                weight.copy_(before)

    optimizer._sync_params = wrong


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.OPTIMIZER,
    package="Megatron-LM before 75120db",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/663",),
    paper=9,
    case=small("zero"),
    patch=patch,
    expected=Expected(
        "layers.2.feed_forward.w1", "update", "not updated", line="weight.copy_(before)", operation="copy_"
    ),
)
