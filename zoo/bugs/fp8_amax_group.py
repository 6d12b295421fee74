"""FP8 with sequence parallelism: the largest value is shared over the wrong group.

Activations are cast by one scale and gathered as bytes, and every rank decodes all bytes by its own scale. Megatron-LM
reduced the largest value over data-parallel ranks only, so that the scales of tensor-parallel ranks differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE, module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small

NVIDIA = "https://github.com/NVIDIA"


def quantise(model: nn.Module) -> None:
    """What layer 1's feed-forward gets is float8: its norm casts, and it decodes after the gather."""
    norm, feed_forward = (model.get_submodule(f"layers.1.{name}") for name in ("ffn_norm", "feed_forward"))
    cast: Any = norm
    inner, outer, cast.reduces = norm.forward, feed_forward.forward, True

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = inner(x)
        is_cut = isinstance(out, DTensor)
        local = out.to_local() if is_cut else out
        largest = local.detach().abs().amax()
        if cast.reduces and is_cut:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        cast.scale = 448.0 / largest
        scaled = local * cast.scale
        q = scaled + (scaled.to(torch.float8_e4m3fn).float() - scaled).detach()
        return DTensor.from_local(q, out.device_mesh, out.placements, run_check=False) if is_cut else q

    norm.forward = forward
    feed_forward.forward = lambda x: outer(x / cast.scale)


def patch(candidate: Candidate) -> None:
    module_of(candidate, "layers.1.ffn_norm").reduces = False


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.WRONG_COMMUNICATION,
    package="Megatron-LM, legacy",
    sources=(f"{NVIDIA}/TransformerEngine/issues/335", f"{NVIDIA}/Megatron-LM/pull/442"),
    paper=7,
    case=small("tp+sp", shape=replace(SHAPE, adapt=quantise)),
    patch=patch,
    expected=Expected("layers.1.ffn_norm", "output", "some ranks", line="if cast.reduces and is_cut", operation="amax"),
)
