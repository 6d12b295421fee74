"""Context parallelism without data parallelism: the model is not wrapped, and its gradients are not reduced.

torchtitan applied FSDP or DDP only where data parallelism was on; with context parallelism alone each rank kept the
gradients of its own part of the sequence. VeOmni's DDP group left the sequence out, with the same effect.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness import context
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(_candidate: Candidate) -> AbstractContextManager[object]:
    right = context.average

    def unreduced(parameters: Any, _group: Any) -> None:
        right(parameters, None, 2)

    return mock.patch.object(context, "average", unreduced)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="torchtitan, VeOmni",
    sources=("https://github.com/pytorch/torchtitan/pull/685", "https://github.com/ByteDance-Seed/VeOmni/issues/1059"),
    case=small("cp-ring"),
    patch=patch,
    expected=Expected(
        "tok", "param_grad", "missing all-reduce", "cp", line="right(parameters, None, 2)", operation="all_reduce"
    ),
)
