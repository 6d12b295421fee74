"""Port: rotary embeddings turn neighbours, and weights are ordered for halves.

Meta's Llama turns pairs of neighbours, transformers' the first half with the second; a converter must permute queries
and keys between them. Here, as in a book's Llama 2, it did not.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported


def patch(training: Any) -> None:
    training.config.rotary_interleaved = True


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="LLMs-from-scratch",
    sources=(
        "https://github.com/rasbt/LLMs-from-scratch/pull/750",
        "https://github.com/huggingface/transformers/issues/25199",
    ),
    case=Ported("llama"),
    patch=patch,
    expected=Expected("decoder.layers.0.self_attention", "output", "attention scores"),
)
