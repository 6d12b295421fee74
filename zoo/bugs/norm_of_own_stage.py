"""Pipeline parallelism: each stage clips by the norm of its own gradients.

torchtitan called `clip_grad_norm_` on the parameters of the stage, and never combined the norms: stages are clipped by
different factors, all too weakly. The gradients themselves are right.
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


def clipped(candidate: Candidate, *, is_combined: bool) -> None:
    def clip(*_: Any) -> None:
        parameters = list(candidate.chunks[0].parameters())
        square = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
        of_all = square.clone()
        dist.all_reduce(of_all)
        others = nn.Parameter(torch.zeros(()))
        others.grad = (of_all - square).sqrt()
        torch.nn.utils.clip_grad_norm_([*parameters, others] if is_combined else parameters, 0.1)

    candidate.optimizer.register_step_pre_hook(clip)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.NORM,
    package="torchtitan before 0.1.0",
    sources=("https://github.com/pytorch/torchtitan/issues/596", "https://github.com/pytorch/torchtitan/pull/649"),
    case=small("pp-gpipe", is_clipped=True),
    patch=partial(clipped, is_combined=False),
    clean_patch=partial(clipped, is_combined=True),
    expected=Expected(
        ".",
        "grad_norm",
        "gradient norm",
        "pp",
        line="torch.nn.utils.clip_grad_norm_([*parameters",
        operation="clip_grad_norm_",
    ),
)
