"""Context parallelism: attention that was imported by name attends to the rank's own part of the sequence only.

torch's context_parallel puts another function in the place of `torch.nn.functional.scaled_dot_product_attention` while
it is open. A module that had imported the function by its name keeps the plain one, and nothing says so.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    module_of(candidate, "layers.1.attention").attend = attend


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.MISSING_COMMUNICATION,
    package="torch",
    sources=("https://github.com/pytorch/pytorch/issues/152261", "https://github.com/pytorch/pytorch/pull/162542"),
    case=small("cp-ring"),
    patch=patch,
    expected=Expected(
        "layers.1.attention",
        "output",
        "unexplained",
        line="scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)",
        operation="scaled_dot_product_attention",
    ),
)
