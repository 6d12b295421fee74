"""Inference: the rollout's log-probabilities are those at the temperature of sampling.

A trainer takes the softmax of logits as they are; TRL compared that with what vLLM returned, which had divided them by
the temperature, or not. The importance ratio of each token, which should be 1, was 2.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.rollout import Generated, Rollout


def patch(rollout: Rollout) -> None:
    rollout.change_logits = lambda logits: logits / 0.7


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.INFERENCE,
    package="TRL, prime-rl",
    sources=(
        "https://github.com/huggingface/trl/issues/4159",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/697",
    ),
    case=Generated(),
    patch=patch,
    expected=Expected("logprobs", "input", "constant factor", words="1.429"),
)
