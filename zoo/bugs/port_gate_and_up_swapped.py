"""Port: gate and up projection are joined in the wrong order.

Both have the same shape, and silu(up) * gate is as finite as silu(gate) * up. nntrainer read its files by position, and
its converters wrote the up projection first; it had been repaired and broken more than once.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported


def patch(training: Any) -> None:
    for chunk in training.chunks:
        for layer in chunk.module.decoder.layers:
            weight = layer.mlp.linear_fc1.weight
            with torch.no_grad():
                weight.copy_(weight.roll(len(weight) // 2, 0))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="nntrainer, mlx-lm",
    sources=(
        "https://github.com/nntrainer/nntrainer/pull/4194",
        "https://github.com/ml-explore/mlx-lm/pull/767",
    ),
    case=Ported("llama"),
    patch=patch,
    expected=Expected("decoder.layers.0.mlp.linear_fc1", "param", "moved"),
)
