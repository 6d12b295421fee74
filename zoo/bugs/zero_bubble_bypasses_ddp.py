"""Zero-bubble pipelines: the backward of weights bypasses the hooks by which DDP reduces gradients.

torch's zero-bubble schedules split the backward, and accumulate the gradients of weights by themselves. DDP learns of
gradients from hooks of autograd, which never run: every replica of a stage steps with its own. The first stage is
not affected: it has no gradient to send and runs its backward in one piece.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE
from zoo.harness.candidate import Cell
from zoo.harness.pipeline import pipeline
from zoo.harness.small import Small


def case(schedule: str) -> Small:
    return Small(Cell(f"{schedule}+ddp", 4, num_microbatches=4), SHAPE, pipeline)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.MISSING_COMMUNICATION,
    package="torch 2.13.0",
    sources=("https://github.com/pytorch/pytorch/issues/144530",),
    case=case("pp-interleaved-zb"),
    clean_case=case("pp-interleaved"),
    expected=Expected(
        "layers.1.attention_norm",
        "param_grad",
        "missing average",
        "dp",
        line="schedule.step(*inputs, **targets)",
        operation="all_reduce",
    ),
    since=(2, 8),
)
