"""Tensor parallelism inside experts: the output's bias is added on every rank before the sum.

torchtitan's grouped experts added the whole bias to each rank's partial product, so that the sum has it tp times.

It needs experts with biases, and tensor parallelism inside them. Biases usually start at zero, so a new model shows
no difference: the updates of the biases are wrong, and so are the outputs of a loaded checkpoint. TTrace generates all
parameters, including biases, so the bug shows at once. Here the second layer of a feed-forward adds its bias before the
sum over ranks, not after it; without the patch it adds it once, as it should.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import bias_on_every_rank
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="torchtitan",
    sources=("https://github.com/pytorch/torchtitan/pull/4245",),
    case=small("hand"),
    patch=bias_on_every_rank,
    expected=Expected(
        "layers.0.mlp.fc2",
        "output",
        "bias",
        line="AllReduce.apply(F.linear(x, module.weight, module.bias)",
        operation="all_reduce",
    ),
)
