"""Inference: tokens attend to more keys than the window of attention allows.

Filling a cache in chunks, ExecuTorch masked all queries of a chunk alike, so that the first ones saw keys from before
their window. Here generation has no window at all, and the trainer has one of six tokens.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.rollout import Generated, Rollout


def patch(rollout: Rollout) -> None:
    rollout.model.config.sliding_window = None


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.INFERENCE,
    package="ExecuTorch",
    sources=(
        "https://github.com/pytorch/executorch/pull/21857",
        "https://github.com/pytorch/executorch/pull/20346",
    ),
    case=Generated(window=6),
    patch=patch,
    expected=Expected("model.model.layers.0.self_attn", "output", "unexplained"),
)
