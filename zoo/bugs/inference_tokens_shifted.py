"""Inference: log-probabilities are those of the next token.

A rewrite of prime-rl's trainer shifted tokens to the left, and what it was compared with was not shifted: each ratio
was that of two different tokens. Here the rollout scores the token after the one that it chose.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.rollout import LENGTH, Generated, Rollout


def patch(rollout: Rollout) -> None:
    rollout.choose = lambda tokens, place: tokens[:, min(place + 1, LENGTH - 1)]


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.INFERENCE,
    package="prime-rl, ms-swift",
    sources=(
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/1525",
        "https://github.com/modelscope/ms-swift/pull/8427",
    ),
    case=Generated(chunk=4),
    patch=patch,
    expected=Expected("logprobs", "output", "unexplained"),
)
