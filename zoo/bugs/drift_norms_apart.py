"""Drift: weights that tensor parallelism replicates drift apart.

Each tensor-parallel rank computes the gradient of a norm by itself. Where a kernel sums in another order on each rank,
gradients differ in their last bit, nobody reduces them, and the replicas part, step by step. Here one rank's gradient
is off by a part in 10 million.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Cell
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    def disturb(step: int) -> None:
        for name, parameter in training.model.named_parameters():
            if name == "layers.2.ffn_norm.weight" and step >= 2 and training.rank == 1 and parameter.grad is not None:
                parameter.grad.mul_(1.0 + 2e-7)

    training.before_step = disturb


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="torch",
    sources=("https://github.com/pytorch/pytorch/issues/160169",),
    case=Watched(Cell("tp", 2)),
    patch=patch,
    expected=Expected("layers.2.ffn_norm", "param_grad", "replicas differ", "tp"),
)
