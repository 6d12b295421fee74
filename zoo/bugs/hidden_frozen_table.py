"""A table of positions that is not trained holds other values in the distributed run.

Position embeddings that are computed once and frozen are easily computed again by something else: in transformers,
loading a model changed a sinusoidal table. Here each rank starts the positions again. Generated values would replace
the table on both sides; it keeps its own, because it was computed without random numbers.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.frozen import FROZEN, make_table
from zoo.harness.gpt import LENGTH


def patch(candidate: Candidate) -> None:
    table = make_table(torch.arange(LENGTH) % (LENGTH // 2))
    module_of(candidate, "places").weight.data.copy_(table)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="transformers",
    sources=("https://github.com/huggingface/transformers/issues/31387",),
    case=FROZEN,
    patch=patch,
    is_early=True,
    expected=Expected("places", "param", "moved"),
)
