"""Sequence parallelism: the gradients of norms are averaged over ranks where they should be summed.

gpt-neox lost the hook of its norms when the optimizer was set up, and the one it got back divided by the number of
ranks: each rank has a share of the sequence, so the shares must be added.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import at_gradient
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    def averaged(gradient: DTensor) -> torch.Tensor:
        return gradient / gradient.device_mesh.size()

    at_gradient(candidate, "layers.1.ffn_norm.weight", averaged)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="gpt-neox",
    sources=("https://github.com/EleutherAI/gpt-neox/pull/1259",),
    case=small("tp+sp"),
    patch=patch,
    expected=Expected(
        "layers.1.ffn_norm",
        "param_grad",
        "constant factor",
        "tp",
        line="gradient / gradient.device_mesh.size()",
        operation="div",
    ),
)
