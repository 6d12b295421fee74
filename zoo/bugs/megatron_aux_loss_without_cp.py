"""megatron-core 0.13.0: the loss is multiplied by cp before gradients are averaged, the auxiliary loss is not.

Since 0.12 the schedule multiplies the loss by cp, as gradients are averaged over dp x cp afterwards. The router's
auxiliary loss does not go through the schedule: it has 1/cp of the weight that was asked for, and experts are
balanced less. 0.16 multiplies it too.

Release 0.11.0, where the factor was the training script's, lacks it too (docs/found/auxiliary-loss.md).
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import moe

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="megatron-core 0.12.0-0.15.3",
    sources=("https://github.com/NVIDIA/Megatron-LM/pull/2237",),
    case=moe(version="0.13.0", cp=2),
    clean_case=moe(cp=2),
    expected=Expected(
        "decoder.layers.1.mlp.router", "loss", "constant factor", "cp", "0.5 x the reference: scaled by 1/cp"
    ),
)
