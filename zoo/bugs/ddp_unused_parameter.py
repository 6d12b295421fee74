"""DDP: a parameter that no loss depends on keeps its whole bucket from being reduced.

Without `find_unused_parameters` DDP waits for a gradient that never comes, and reduces nothing of that bucket. Every
rank steps with its own gradients; an error is raised at the next forward only.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE
from zoo.harness.small import small


def add_unused(model: nn.Module) -> None:
    model.unused = nn.Linear(2, 2)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.MISSING_COMMUNICATION,
    package="torch 2.13.0",
    sources=("https://github.com/pytorch/pytorch/issues/128949",),
    case=small("ddp", num_microbatches=1, shape=replace(SHAPE, adapt=add_unused)),
    clean_case=small("ddp", num_microbatches=1),
    expected=Expected(
        "tok", "param_grad", "missing average", "dp", line="/ num_microbatches).backward()", operation="all_reduce"
    ),
)
