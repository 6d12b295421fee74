"""megatron-core 0.16.1: where losses are counted by token, the auxiliary loss counts those of one rank.

With `calculate_per_token_loss` gradients are divided by the tokens of the whole batch in the end, so that the
router's auxiliary loss is multiplied by its tokens first. It takes the tokens that this rank has, a part of the
sequence under sequence or context parallelism, and so has 1/tp or 1/cp of its weight.

The loss itself is right, and so is all that does not depend on the router. Experts are balanced less than was asked
for, the less the more ranks share a sequence, so that another number of ranks is another training. The clean side
counts losses by microbatch, where nothing has to be multiplied. Here tp cuts the sequence; with cp it is the same.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import moe

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="megatron-core 0.12.0-0.18.2",
    sources=("https://github.com/NVIDIA/Megatron-LM/pull/5047",),
    case=moe(tp=2, sp=True, per_token=True),
    clean_case=moe(tp=2, sp=True),
    expected=Expected("decoder.layers.1.mlp.router", "loss", "constant factor", "tp", "scaled by 1/tp"),
)
