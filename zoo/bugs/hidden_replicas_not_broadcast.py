"""HSDP: each group of replicas initialises its own weights, and nothing broadcasts them.

OLMo-core gave each rank a seed of its own, so that sharded weights differ. Unlike DDP, FSDP2 does not synchronise the
groups that hold replicas of the shards, so each group trained another model. Generated values replace these weights in
a traced step, so no tensor of the step shows it.
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
    for name in ("w1", "w2"):
        weight = module_of(candidate, f"layers.1.feed_forward.{name}").weight
        nn.init.normal_(weight.to_local(), std=0.02)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="OLMo-core",
    sources=("https://github.com/allenai/OLMo-core/pull/319",),
    case=small("hsdp"),
    patch=patch,
    is_early=True,
    expected=Expected("layers.1.feed_forward.w1", "param", "not broadcast", "replicate"),
)
