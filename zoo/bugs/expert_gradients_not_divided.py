"""Expert parallelism: gradients of experts are divided by the ranks that share them, not by all that feed them.

An expert sees the tokens of all ranks, each of which has a mean over its own. torchtitan let FSDP divide by the expert
mesh, DeepSpeed by the expert-data-parallel size: too large by ep.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness import experts
from zoo.harness.candidate import Candidate
from zoo.harness.context import average
from zoo.harness.small import small


def patch(_candidate: Candidate) -> AbstractContextManager[object]:
    def divided_by_sharers(parameters: Any, group: Any, divisor: int = 0) -> None:
        average(parameters, group, 1 if divisor else 0)

    return mock.patch.object(experts, "average", divided_by_sharers)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="torchtitan before 0.2.0, DeepSpeed before 0.15.4",
    sources=("https://github.com/pytorch/torchtitan/pull/1551", "https://github.com/deepspeedai/DeepSpeed/pull/6546"),
    case=small("ep"),
    patch=patch,
    expected=Expected(
        "layers.0.feed_forward.experts",
        "param_grad",
        "double reduction",
        "ep",
        line="local /= divisor or",
        operation="div_",
    ),
)
