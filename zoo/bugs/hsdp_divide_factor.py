"""HSDP: gradients are divided by the shards only, not by the replicas.

FSDP2 took another factor for a hybrid mesh than for a flat one: what is summed over all ranks was divided by those of
one replica.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    block = module_of(candidate, "layers.1")
    block.set_force_sum_reduction_for_comms(True)
    block.set_gradient_divide_factor(2.0)  # of 4 ranks


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="older torch",
    sources=("https://github.com/pytorch/pytorch/issues/155903",),
    case=small("hsdp", 4, num_microbatches=1),
    patch=patch,
    expected=Expected(
        "layers.1.attention_norm",
        "param_grad",
        "double reduction",
        line="set_gradient_divide_factor(2.0)",
        operation="reduce_scatter",
    ),
)
