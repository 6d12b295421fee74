"""Tensor parallelism: the optimizer still holds the parameters from before the model was cut.

accelerate parallelised the model after the optimizer was made and did not put the new parameters into its groups. Every
step updates tensors that are no longer used.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    group: dict[str, Any] = candidate.optimizer.param_groups[0]
    group["params"] = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.OPTIMIZER,
    package="accelerate before 1.12",
    sources=("https://github.com/huggingface/accelerate/pull/3835",),
    case=small("tp"),
    patch=patch,
    expected=Expected(
        "tok", "update", "not updated", line="nn.Parameter(parameter.detach().clone())", operation="step"
    ),
)
