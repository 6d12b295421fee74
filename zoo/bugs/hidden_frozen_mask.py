"""A causal mask that is a frozen parameter begins one token too late, so each token sees the next one.

Which diagonal is the first of the mask was asked of GPT-SoVITS, whose decoder was said to look ahead. As a parameter,
the mask of the distributed run would be replaced by generated values, like that of the reference; it keeps its own,
because it was computed without random numbers.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.frozen import FROZEN


def patch(candidate: Candidate) -> None:
    mask = module_of(candidate, "layers.1.attention").mask
    mask.data.copy_(-1e4 * torch.ones_like(mask).triu(2))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="GPT-SoVITS",
    sources=("https://github.com/RVC-Boss/GPT-SoVITS/issues/965",),
    case=FROZEN,
    patch=patch,
    is_early=True,
    expected=Expected("layers.1.attention", "param", "moved"),
)
