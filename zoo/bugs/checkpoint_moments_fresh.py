"""Checkpoint: the optimizer's moments are not loaded.

A name that changed, a section that was not saved, a loader that returns what nobody uses: the optimizer starts again,
with no moments and at step 0, and the first updates are as large as those of a new run.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.resumed import Loaded, Resumed


def patch(loaded: Loaded) -> None:
    for state in loaded.moments.values():
        for moment in state.values():
            moment.zero_()


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="NeMo Automodel, Megatron-Bridge",
    sources=(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/764",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5680",
    ),
    case=Resumed(),
    patch=patch,
    expected=Expected("tok", "optim", "zeros"),
)
