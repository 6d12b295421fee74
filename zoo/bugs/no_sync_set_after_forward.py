"""DDP with accumulation: the switch for the last microbatch is set after its forward.

DDP decides in the forward whether the backward will reduce. build-nanogpt set `require_backward_grad_sync` between the
two: what is reduced is the first microbatch, and the others stay each rank's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import NUM_MICROBATCHES
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def switched(candidate: Candidate, *, before: bool) -> None:
    ddp: Any = candidate.chunks[0]
    forward = ddp.forward
    calls: list[int] = []

    def switch() -> None:
        ddp.require_backward_grad_sync = len(calls) == NUM_MICROBATCHES

    def switching(*args: Any) -> Any:
        calls.append(1)
        if before:
            switch()
        out = forward(*args)
        switch()
        return out

    ddp.forward = switching


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="build-nanogpt",
    sources=("https://github.com/karpathy/build-nanogpt/pull/30",),
    case=small("ddp"),
    patch=partial(switched, before=False),
    clean_patch=partial(switched, before=True),
    expected=Expected(
        "tok",
        "param_grad",
        "missing average",
        "dp",
        line="require_backward_grad_sync = len(calls) == NUM",
        operation="all_reduce",
    ),
)
