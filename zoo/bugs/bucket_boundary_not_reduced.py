"""ZeRO-3: a parameter exactly as large as the bucket is never reduced.

DeepSpeed compared with `<` instead of `<=`: a gradient that fills the bucket to the last element is not reduced, and
each rank keeps its own.

It needs a model that has a parameter of exactly the bucket's size. There is no message: the loss of the first step is
exact, all other gradients are right, and the ranks' copies of this one drift apart from the first update on. Here the
gradient of one projection is left out of the sum over ranks.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import left_out_of_reduction
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="DeepSpeed before 0.11.0",
    sources=("https://github.com/deepspeedai/DeepSpeed/pull/4321",),
    case=small("cp-ulysses"),
    patch=left_out_of_reduction("layers.1.attention.wk"),
    expected=Expected(
        "layers.1.attention.wk",
        "param_grad",
        "missing all-reduce",
        "cp",
        line="dist.all_reduce(local, group=group)",
        operation="all_reduce",
    ),
)
