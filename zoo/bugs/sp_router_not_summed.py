"""Mixture of experts: each rank's router learns from its own tokens alone.

Where the sequence is cut, every rank routes other tokens. The router of Megatron-LM's legacy SwitchMLP was not marked
as sequence parallel, so that its gradient was left out of the sum over ranks, and the copies drifted apart.

It needs a mixture of experts with tensor and sequence parallelism. The loss of the first step is exact. Here experts
are on other ranks, and each rank routes its own tokens.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import left_out_of_reduction
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="Megatron-LM, legacy",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/599", "https://github.com/NVIDIA/Megatron-LM/pull/619"),
    paper=6,
    case=small("ep"),
    patch=left_out_of_reduction("layers.2.feed_forward.router"),
    expected=Expected(
        "layers.2.feed_forward.router",
        "param_grad",
        "missing all-reduce",
        "ep",
        line="dist.all_reduce(local, group=group)",
        operation="all_reduce",
    ),
)
