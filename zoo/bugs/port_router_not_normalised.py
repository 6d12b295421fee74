"""Port: the chances of the chosen experts are not normalised.

Megatron takes the softmax of the chosen experts' scores, transformers' Qwen3-MoE that of all and divides by the sum of
the chosen: the same. With `moe_router_pre_softmax`, or without `norm_topk_prob`, nobody divides.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported


def patch(training: Any) -> None:
    training.config.moe_router_pre_softmax = True


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="Megatron-LM, Qwen2-MoE",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/955",
        "https://github.com/NVIDIA/Megatron-LM/issues/1593",
        "https://github.com/QwenLM/Qwen3/issues/687",
    ),
    case=Ported("qwen3-moe", (("ep", 2),)),
    patch=patch,
    expected=Expected("decoder.layers.0.mlp", "output", "row factors"),
)
