"""Recomputation in chunks: every layer of a chunk gets the chunk's input, not the output of the layer before it.

Only the last layer of each chunk has an effect, and the others have no gradient. Megatron-LM had it twice, in its
legacy model and in core. The loss of a fresh model hardly changes: 3.4759 became 3.4756.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small

PER_CHUNK = 2


def in_chunks(candidate: Candidate, *, is_stale: bool) -> None:
    model: Any = candidate.chunks[0]
    layers = list(model.layers.values())

    def chunk(start: int, x: torch.Tensor) -> torch.Tensor:
        out = x
        for layer in layers[start : start + PER_CHUNK]:
            out = layer(x if is_stale else out, model.rope)
        return out

    def forward(ids: torch.Tensor) -> torch.Tensor:
        h = model.tok(ids)
        for start in range(0, len(layers), PER_CHUNK):
            h = checkpoint(chunk, start, h, use_reentrant=False)
        out: torch.Tensor = model.output(model.norm(h))
        return out

    model.forward = forward


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="Megatron-LM before fc2c81d, core before 6771c77",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/371", "https://github.com/NVIDIA/Megatron-LM/pull/290"),
    paper=2,
    case=small("tp"),
    patch=partial(in_chunks, is_stale=True),
    clean_patch=partial(in_chunks, is_stale=False),
    expected=Expected(".", "output", "another's values", line="layer(x if is_stale else out", operation="layer"),
)
