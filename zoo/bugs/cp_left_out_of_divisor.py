"""Context parallelism: gradients are summed over all ranks and divided by the data-parallel ones alone.

Megatron-core 0.8.0 scales gradients by 1/dp, though it reduces them over dp x cp. Every gradient is too large by cp.
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
    return mock.patch.object(context, "average", partial(context.average, divisor=1))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="megatron-core 0.8.0",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/906",),
    paper=4,
    case=small("cp-gather"),
    patch=patch,
    expected=Expected("tok", "param_grad", "double reduction", "cp", line="local /= divisor or", operation="div_"),
)
