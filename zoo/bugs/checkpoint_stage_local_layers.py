"""Checkpoint: layers are saved under their number in the stage, and loaded into other layers with another pipeline.

Megatron-FSDP's checkpoints name layers as the stage counts them. A model with fewer or more stages finds all names, and
loads the first stage's layers into all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    """The second stage's layers 2 and 3 get what the first stage's 0 and 1 hold."""
    for parameter in candidate.chunks[0].layers.parameters():  # type: ignore[union-attr]  # a module
        saved = parameter.detach().clone()
        dist.broadcast(saved, 0)
        with torch.no_grad():
            parameter.copy_(saved)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="megatron-core, Megatron-FSDP",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/7452",),
    case=small("pp-1f1b"),
    patch=patch,
    expected=Expected(
        "layers.2.attention_norm", "param", "another's values", line="parameter.copy_(saved)", operation="copy_"
    ),
)
