"""Optimizer: its state was created by a real step, so Adam counts one step too many.

Megatron-FSDP initialised the state of Adam by stepping with gradients of zero: weights had decayed once, and the bias
correction of the first real step is that of the second.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    for parameter in candidate.chunks[0].parameters():
        zeros = torch.zeros_like(parameter)
        state = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        candidate.optimizer.state[parameter] = state


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.OPTIMIZER,
    package="megatron-core before 0.19, Megatron-FSDP",
    sources=("https://github.com/NVIDIA/Megatron-LM/pull/5976",),
    case=small("fsdp"),
    patch=patch,
    expected=Expected("tok", "update", "step count", line='"step": torch.tensor(1.0)', operation="step"),
)
