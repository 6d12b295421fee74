"""Optimizer: a scheduler gives every group the learning rate of the first.

DeepSpeed's WarmupLR and CosineLR wrote one number into all groups; Megatron-core's `lr_mult` was reset in a loop, so
that only the first scaled group kept its own. Here the head is meant to learn like the rest, and learns 1.5 times as
fast.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import other_learning_rate
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.OPTIMIZER,
    package="DeepSpeed before 0.19.4, megatron-core 0.6.0-0.7.0",
    sources=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8171",
        "https://github.com/deepspeedai/DeepSpeed/pull/7969",
    ),
    case=small("hand"),
    patch=other_learning_rate,
    expected=Expected("head", "update", "optimizer settings", line='"lr": 1.5 * group["lr"]', operation="step"),
)
