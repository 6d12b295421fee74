"""Ulysses without ZeRO: gradients are divided by the sequence-parallel ranks once more.

DeepSpeed averaged over sequence and data parallel ranks where the loss was a mean over the sequence already: the norm
was 3.956 instead of 15.825 on four ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness import context
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(_candidate: Candidate) -> AbstractContextManager[object]:
    return mock.patch.object(context, "average", partial(context.average, divisor=4))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="DeepSpeed before 0.14.3",
    sources=("https://github.com/deepspeedai/DeepSpeed/pull/5555",),
    case=small("cp-ulysses"),
    patch=patch,
    expected=Expected("tok", "param_grad", "constant factor", "cp", line="local /= divisor or", operation="div_"),
)
