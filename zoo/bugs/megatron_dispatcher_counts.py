"""megatron-core 0.11.0: the dispatcher brings tokens back by counts of another shape.

With tensor and expert parallelism together, `num_global_tokens_per_local_expert` is first the counts of this rank's
tensor parallel share and is then overwritten by those of all of them. Outputs of experts come back to the wrong
tokens: the loss is 5.0093 where it should be 5.0059, and gradients are off by two thirds. 0.10.0 and 0.12.3 are
right.

The all-gather dispatcher, which does not use these counts, is right.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import moe

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.DATA,
    package="megatron-core 0.11.0",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.11.0/megatron/core/transformer/moe/token_dispatcher.py",
    ),
    case=moe(4, "0.11.0", tp=2, sp=True, ep=2),
    clean_case=moe(4, "0.11.0", tp=2, sp=True, ep=2, dispatcher="allgather"),
    expected=Expected("decoder.layers.0.mlp", "output", "some ranks"),
)
