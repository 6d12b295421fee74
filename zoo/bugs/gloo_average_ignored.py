"""gloo in torch 2.8 and before: reduce_scatter_tensor sums where the average is asked for.

FSDP2 leaves the division by the number of ranks to the reduction. On CPU its gradients are then larger by the number of
ranks, without a warning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def average(_: Candidate) -> AbstractContextManager[object]:
    """Divide after the sum, as a backend does that knows averages."""
    reduce_scatter = dist.reduce_scatter_tensor

    def divided(output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:  # noqa: A002
        reduce_scatter(output, input, dist.ReduceOp.SUM, group)
        if op == dist.ReduceOp.AVG:
            output /= dist.get_world_size(group)

    return mock.patch.object(dist, "reduce_scatter_tensor", divided)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="torch 2.8.0",
    sources=("https://github.com/pytorch/pytorch/issues/162338",),
    case=small("fsdp"),
    clean_patch=average,
    expected=Expected("tok", "param_grad", "double reduction", "dp", words="2 x the reference"),
    until=(2, 8),
)
