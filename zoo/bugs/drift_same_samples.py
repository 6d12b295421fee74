"""Drift: every rank trains on the same samples.

An iterable dataset knows nothing of ranks: each of them reads all of it, unless somebody splits it. Training works, and
is worth that of one rank.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    rank = training.rank

    def read_first(step: int):  # type: ignore[no-untyped-def]
        training.rank = 0
        words = training.read_own_batch(step)
        training.rank = rank
        return words

    training.read_batch = read_first


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="datasets, Lightning",
    sources=(
        "https://github.com/huggingface/datasets/issues/5360",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/15734",
    ),
    case=Watched(),
    patch=patch,
    expected=Expected(".", "data", "same data", "dp"),
)
