"""Port: norms add another epsilon than the model was trained with.

torchtune built Llama's norms with an epsilon of 1e-5, and the original has 1e-6. All weights agree; what a norm returns
differs in the third digit where activations are small, and the model answers a little worse.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.ported import Ported


def patch(training: Any) -> None:
    for chunk in training.chunks:
        for module in chunk.modules():
            if hasattr(module, "eps"):
                module.eps = 1e-6


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.PORT,
    package="torchtune",
    sources=("https://github.com/meta-pytorch/torchtune/pull/152",),
    case=Ported("llama"),
    patch=patch,
    expected=Expected("decoder.layers.0.input_layernorm", "output", "row factors"),
)
