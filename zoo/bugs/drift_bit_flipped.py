"""Drift: one bit of one weight flips on one of four ranks.

Silent data corruption: a processor or its memory returns a wrong bit, and no error. From then on one replica trains
another model, and its gradients spoil those of all. torchtitan runs steps twice to find it while it happens.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Cell
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    def flip(step: int) -> None:
        if step == 5 and training.rank == 2:
            words = training.find_parameter("layers.1.attention.wq.weight").view(torch.int32)
            words[3, 4] ^= 1 << 17

    training.before_step = flip


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="hardware",
    sources=(
        "https://github.com/pytorch/torchtitan/pull/4324",
        "https://github.com/pytorch/torchtitan/pull/4334",
    ),
    case=Watched(Cell("ddp", 4)),
    patch=patch,
    expected=Expected("layers.1.attention.wq", "param", "replicas differ", "dp", words="differs on rank 2 along dp"),
)
