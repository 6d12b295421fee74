"""Context parallelism: keys and values are gathered along heads, not along the sequence.

torchtitan's all-gather named the wrong dim. Shapes fit where heads are shared, and each rank attends to its own part of
the sequence only, with the heads of others.
"""

from __future__ import annotations

import torch
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F

from ttrace.judge.verdict import CauseName
from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (torch.cat(differentiable.all_gather(t.contiguous()), 1) for t in (k, v))  # along 2 is right
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def patch(candidate: Candidate) -> None:
    module_of(candidate, "layers.2.attention").attend = attention


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.WRONG_COMMUNICATION,
    package="torchtitan",
    sources=("https://github.com/pytorch/torchtitan/pull/3206",),
    case=small("cp-gather"),
    patch=patch,
    expected=Expected(
        "layers.2.attention",
        "output",
        CauseName.UNEXPLAINED.value,
        line="torch.cat(differentiable.all_gather(t.contiguous()), 1)",
        operation="cat",
    ),
)
