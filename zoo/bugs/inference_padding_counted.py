"""Inference: positions count the padding on the left of a prompt.

With a cache, MosaicML's model cut the mask before it counted positions, and so counted padding. Prompts of full length
are right; shorter ones are rotated by other angles and attend to padding.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.rollout import Generated, Rollout


def patch(rollout: Rollout) -> None:
    rollout.change_mask = torch.ones_like


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.INFERENCE,
    package="MosaicML examples",
    sources=("https://github.com/mosaicml/examples/pull/257",),
    case=Generated(),
    patch=patch,
    expected=Expected("model.model.rotary_emb", "output", "attention scores"),
)
