"""Ulysses: heads come back from the all-to-all in another order.

DeepSpeed's all-to-all reshaped what it received without the transpose that puts the parts of all ranks side by side,
and so mixed up which head is whose.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.context import traded
from zoo.harness.small import small
from zoo.harness.transformer import causal


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = traded(causal(traded(q, 1, 2), traded(k, 1, 2), traded(v, 1, 2)), 2, 1)
    mixed: torch.Tensor = out.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # (rank, head) read as (head, rank)
    return mixed


def patch(candidate: Candidate) -> None:
    module_of(candidate, "layers.2.attention").attend = attention


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.WRONG_COMMUNICATION,
    package="DeepSpeed before 0.14.4",
    sources=("https://github.com/deepspeedai/DeepSpeed/pull/5664",),
    case=small("cp-ulysses"),
    patch=patch,
    expected=Expected(
        "layers.2.attention",
        "output",
        "moved",
        line="out.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)",
        operation="flatten",
    ),
)
