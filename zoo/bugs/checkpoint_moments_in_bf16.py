"""Checkpoint: the moments of Adam were kept in bfloat16.

OpenTau loaded moments of an older format, in bfloat16, into an optimizer that keeps float32: nothing says that they
were rounded. The first update after the resume is off by a part in 500.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.resumed import Loaded, Resumed


def patch(loaded: Loaded) -> None:
    for state in loaded.moments.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(torch.bfloat16))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="OpenTau",
    sources=("https://github.com/TensorAuto/OpenTau/issues/184",),
    case=Resumed(),
    patch=patch,
    expected=Expected("tok", "optim", "weaker dtype"),
)
