"""Port: queries, keys and values are joined one after the other, and the other side reads them by group.

With grouped-query attention Megatron's joined weight has, for each group, its queries, its key and its value. The
converter of Megatron-LLM was right for one query per key only, and so for all models but the largest.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported


def patch(training: Any) -> None:
    """Order the rows of each rank as queries, keys and values; heads have 8, and groups two queries."""
    for chunk in training.chunks:
        for layer in chunk.module.decoder.layers:
            weight = layer.self_attention.linear_qkv.weight
            query, key, value = weight.detach().unflatten(0, (-1, 32)).split([16, 8, 8], 1)
            with torch.no_grad():
                weight.copy_(torch.cat([part.flatten(0, 1) for part in (query, key, value)]))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="Megatron-LLM",
    sources=(
        "https://github.com/epfLLM/Megatron-LLM/pull/45",
        "https://github.com/alibaba/ChatLearn/pull/277",
    ),
    case=Ported("llama", (("pp", 2),)),
    patch=patch,
    expected=Expected("decoder.layers.0.self_attention.linear_qkv", "param", "moved"),
)
