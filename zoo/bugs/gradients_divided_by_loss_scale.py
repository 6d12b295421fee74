"""DeepSpeed without ZeRO: bfloat16 gradients are divided by the loss scale of float16.

No loss is scaled in bfloat16, but the gradients were divided by 65536 all the same. Adam hides it, down to its epsilon.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    for parameter in candidate.chunks[0].parameters():
        parameter.register_hook(lambda gradient: gradient / 65536)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="DeepSpeed before 0.18.6",
    sources=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
        "https://github.com/deepspeedai/DeepSpeed/pull/7839",
    ),
    case=small("ddp"),
    patch=patch,
    expected=Expected("tok", "param_grad", "constant factor", line="gradient / 65536", operation="div"),
)
