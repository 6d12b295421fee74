"""Checkpoint: weights come back from a copy in bfloat16.

Megatron's precision-aware optimizer loaded its float32 masters through the parameters' bfloat16; OpenTau did not save
them, and built them again from the model. Sixteen bits of each weight are gone after every resume.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.resumed import Loaded, Resumed


def patch(loaded: Loaded) -> None:
    for value in loaded.model.values():
        value.copy_(value.to(torch.bfloat16))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="megatron-core, OpenTau",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1359",
        "https://github.com/TensorAuto/OpenTau/issues/185",
    ),
    case=Resumed(),
    patch=patch,
    expected=Expected("tok", "param", "weaker dtype"),
)
