"""Accumulation: gradients are set to zero before every microbatch, not before every step.

A trainer of torchtitan's rl called `zero_grad` inside the loop over microbatches: only the last one counts, divided by
the number of all.
"""

from __future__ import annotations

from typing import Any

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    def before(*_: Any) -> None:
        candidate.optimizer.zero_grad()

    candidate.chunks[0].register_forward_pre_hook(before)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.OPTIMIZER,
    package="torchtitan (rl)",
    sources=("https://github.com/pytorch/torchtitan/pull/3575",),
    case=small("tp", microbatch_grads=True),
    patch=patch,
    expected=Expected(
        "tok", "param_grad", "another's values", line="candidate.optimizer.zero_grad()", operation="zero_grad"
    ),
)
