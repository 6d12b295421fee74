"""Checkpoint: the schedule of the learning rate starts again.

NeMo Automodel loaded the states of optimizer and schedule and put them nowhere: a resumed run had the learning rate of
step 0. Here only the rate is that of the start, as where a schedule is built after the optimizer was loaded.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.resumed import Loaded, Resumed


def patch(loaded: Loaded) -> None:
    for group in loaded.optimizer["param_groups"]:
        group["lr"] = 1e-3


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="NeMo Automodel, distiller",
    sources=(
        "https://github.com/NVIDIA-NeMo/Automodel/issues/763",
        "https://github.com/IntelLabs/distiller/issues/70",
    ),
    case=Resumed(),
    patch=patch,
    expected=Expected("tok", "update", "optimizer settings"),
)
