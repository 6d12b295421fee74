"""Checkpoint: a state dict is matched with the model by position, not by name.

accelerate zipped the full state dict with the sharded parameters of FSDP2. Where their order differs but their shapes
do not, a weight gets the values of another.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import parameter_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    w1, w3 = (parameter_of(candidate, f"layers.1.feed_forward.w{i}.weight").to_local() for i in (1, 3))
    with torch.no_grad():
        kept = w1.clone()
        w1.copy_(w3)
        w3.copy_(kept)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="accelerate before 1.14",
    sources=("https://github.com/huggingface/accelerate/pull/3982",),
    case=small("fsdp"),
    patch=patch,
    expected=Expected("layers.1.feed_forward.w1", "param", "another's values", line="w1.copy_(w3)", operation="copy_"),
)
