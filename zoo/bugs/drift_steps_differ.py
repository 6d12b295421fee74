"""Drift: the optimizer of one rank takes other steps than those of the others.

Shampoo left out its step on ranks that had no gradients, so that their counts fell behind, and with them the times at
which preconditioners are computed. Here one rank steps a second time.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    def step_twice(step: int) -> None:
        if step == 4 and training.rank == 1:
            training.optimizer.step()

    training.before_step = step_twice


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="Shampoo",
    sources=("https://github.com/facebookresearch/optimizers/pull/149",),
    case=Watched(),
    patch=patch,
    expected=Expected(".", "steps", "step count"),
)
