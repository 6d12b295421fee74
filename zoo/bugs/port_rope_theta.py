"""Port: the base of rotary embeddings is not carried over.

The list of settings that nanotron's converter copies from a config of transformers had no `rope_theta`: the port turns
queries and keys by other angles. Short prompts hardly show it.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported


def patch(training: Any) -> None:
    for chunk in training.chunks:
        rotary = chunk.module.rotary_pos_emb
        rotary.inv_freq = rotary.inv_freq * 0.5


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="nanotron",
    sources=("https://github.com/huggingface/nanotron/pull/188",),
    case=Ported("llama"),
    patch=patch,
    expected=Expected("decoder.layers.0.self_attention", "output", "attention scores"),
)
