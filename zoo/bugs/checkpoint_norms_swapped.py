"""Checkpoint: the norms before attention and before the feed-forward are swapped in a conversion.

torchtitan's converter wrote each under the other's name. Shapes are equal, and both are close to one.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import parameter_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    for layer in range(4):
        names = (f"layers.{layer}.{norm}.weight" for norm in ("attention_norm", "ffn_norm"))
        first, second = (parameter_of(candidate, name) for name in names)
        with torch.no_grad():
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="torchtitan",
    sources=("https://github.com/pytorch/torchtitan/pull/1455",),
    case=small("tp"),
    patch=patch,
    expected=Expected(
        "layers.0.attention_norm", "param", "another's values", line="first.copy_(second)", operation="copy_"
    ),
)
