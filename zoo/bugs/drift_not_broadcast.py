"""Drift: the parameters of one rank are not those that were broadcast.

DDP's constructor broadcasts parameters. In a development version of torch some of them arrived changed, by a race with
a buffer; with `init_sync=False` nothing is broadcast at all. Gradients are equal everywhere, so replicas stay apart.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    if training.rank == 1:
        drawn = torch.Generator().manual_seed(7)
        weight = training.find_parameter("layers.0.feed_forward.w1.weight")
        weight.copy_(torch.randn(weight.shape, generator=drawn) * 0.1)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="torch",
    sources=(
        "https://github.com/pytorch/pytorch/issues/48188",
        "https://github.com/pytorch/pytorch/pull/142824",
    ),
    case=Watched(),
    patch=patch,
    expected=Expected("layers.0.feed_forward.w1", "param", "replicas differ", "dp"),
)
