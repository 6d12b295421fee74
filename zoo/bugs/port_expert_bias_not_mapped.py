"""Port: the bias that chooses experts is not in the map.

Megatron-Bridge mapped `e_score_correction_bias` for the last layers only. Kimi K2's other layers kept zeros, and tokens
went to other experts than in the original.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported

BIAS = torch.tensor([0.3, -0.2, 0.1, -0.3], device="cpu")


def prepare(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(BIAS)


def load_bias(training: Any) -> None:
    for chunk in training.chunks:
        for layer in chunk.module.decoder.layers:
            layer.mlp.router.expert_bias.copy_(BIAS)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="Megatron-Bridge",
    sources=(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4199",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4657",
    ),
    case=Ported("deepseek-v3", (("ep", 2),), prepare=prepare),
    clean_patch=load_bias,
    expected=Expected("decoder.layers.0.mlp.router", "buffer", "zeros"),
)
