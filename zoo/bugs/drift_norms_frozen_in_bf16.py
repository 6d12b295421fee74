"""Drift: weights of norms in bfloat16 never move.

Near one, numbers of bfloat16 lie 0.004 to 0.008 apart, and Adam's updates are at most as large as the learning rate:
with 1e-3 every update is rounded away. The norms of a draft model were exactly one after 56,000 steps.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    norms = [parameter for name, parameter in training.model.named_parameters() if "norm" in name]

    def round_norms(*_: object) -> None:
        with torch.no_grad():
            for weight in norms:
                weight.copy_(weight.to(torch.bfloat16))

    training.optimizer.register_step_post_hook(round_norms)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="Model-Optimizer",
    sources=("https://github.com/NVIDIA/Model-Optimizer/pull/2322",),
    case=Watched(),
    patch=patch,
    expected=Expected("layers.0.attention_norm", "param", "frozen"),
)
