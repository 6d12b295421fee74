"""Accumulation: the last microbatch is added after the gradients were reduced.

BF16_Optimizer of DeepSpeed 0.18.6-0.18.9 reduced what was accumulated so far, and then added what the last backward
gave; FunASR's condition for `no_sync` was off by one, with the same effect. Each rank steps with its own last
microbatch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import NUM_MICROBATCHES
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def reduced_at(candidate: Candidate, *, last: int) -> None:
    ddp: Any = candidate.chunks[0]
    calls: list[int] = []

    def before(*_: Any) -> None:
        calls.append(1)
        ddp.require_backward_grad_sync = len(calls) == last

    ddp.register_forward_pre_hook(before)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="DeepSpeed 0.18.6-0.18.9, FunASR",
    sources=("https://github.com/deepspeedai/DeepSpeed/pull/7985", "https://github.com/modelscope/FunASR/pull/3472"),
    case=small("ddp"),
    patch=partial(reduced_at, last=NUM_MICROBATCHES - 1),
    clean_patch=partial(reduced_at, last=NUM_MICROBATCHES),
    expected=Expected("tok", "param_grad", "missing average", "dp", line="len(calls) == last", operation="all_reduce"),
)
