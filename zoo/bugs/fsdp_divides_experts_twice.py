"""FSDP2 in torch 2.13: gradients are divided twice where the group that reduces them has one rank.

With `set_gradient_divide_factor` and `set_force_sum_reduction_for_comms` both set, a group of one rank divides before
and after; pull request 167178 made it heed the factor at all. `DistributedConfig(fsdp_size=n, ep_size=n)` of
transformers sets both: experts get 1/n of their gradients.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.hugging import Case


def divide_once(candidate: Candidate) -> None:
    for name, module in candidate.chunks[0].named_modules():
        if name.endswith(".experts"):
            experts: Any = module
            experts.set_force_sum_reduction_for_comms(False)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="torch 2.13.0 with transformers 5.22.2",
    sources=("https://github.com/pytorch/pytorch/pull/167178",),
    case=Case("qwen3_moe", "fsdp+ep", {"fsdp_size": 2, "ep_size": 2}),
    clean_patch=divide_once,
    expected=Expected("model.layers.0.mlp.experts", "param_grad", "constant factor", "ep"),
    since=(2, 10),
)
