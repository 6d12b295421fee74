"""Port: the words that only pad the vocabulary take part in the softmax.

Megatron makes the vocabulary divisible; the rows beyond it are nobody's words. Where logits are compared, or chances
are needed, they must be cut off: Megatron-Bridge compares only as many as transformers has, and unsloth's kernel let
what pads its blocks into the sum.

Here Megatron's cross entropy is over 64 words, of which the model of transformers has 60. The clean side has as many
words on both sides.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="Megatron-Bridge, unsloth",
    sources=(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2602",
        "https://github.com/unslothai/unsloth/pull/10616",
    ),
    case=Ported("llama", vocab=60),
    clean_case=Ported("llama"),
    expected=Expected(".", "loss", "padded vocabulary"),
)
