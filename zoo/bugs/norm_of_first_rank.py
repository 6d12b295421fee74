"""Tensor parallelism: only the shards of the first rank count in the gradient norm.

DeepSpeed's flat fp16 groups marked all parameters of the other ranks as replicas, and left them out so as not to count
twice. All ranks clip by the same norm, which is too small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small

CUT = (".qkv.", ".fc1.", ".proj.weight", ".fc2.weight")


def clipped(candidate: Candidate, *, counts_all: bool) -> None:
    gradients: Any = dict(candidate.chunks[0].named_parameters())

    def clip(*_: Any) -> None:
        squares = {name: p.grad.square().sum() for name, p in gradients.items()}
        is_cut = {name: any(part in name for part in CUT) for name in squares}
        cut = torch.stack([square for name, square in squares.items() if is_cut[name]]).sum()
        if counts_all:
            dist.all_reduce(cut)
        else:
            dist.broadcast(cut, 0)
        whole = nn.Parameter(torch.zeros(()))
        whole.grad = (cut + sum(square for name, square in squares.items() if not is_cut[name])).sqrt()
        norm = torch.nn.utils.clip_grad_norm_([whole], 0.1)
        for parameter in gradients.values():
            parameter.grad *= (0.1 / (norm + 1e-6)).clamp(max=1.0)

    candidate.optimizer.register_step_pre_hook(clip)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.NORM,
    package="DeepSpeed before 0.14.2",
    sources=("https://github.com/deepspeedai/DeepSpeed/pull/5411",),
    case=small("hand", is_clipped=True),
    patch=partial(clipped, counts_all=False),
    clean_patch=partial(clipped, counts_all=True),
    expected=Expected(".", "grad_norm", "gradient norm", line="dist.broadcast(cut, 0)", operation="broadcast"),
)
