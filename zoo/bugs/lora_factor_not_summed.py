"""LoRA under tensor parallelism: the factor that every rank has whole gets only the rank's share of its gradient.

The other factor is cut with the layer, so each rank sends back a part of the gradient. Bridges between Megatron and
PEFT did not mark the whole factor for the sum over tensor-parallel ranks: its copies drift apart, and the checkpoint
has that of the first rank. The second factor starts at zero, so the first step of a training shows nothing.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.lora import ADAPTED


def patch(candidate: Candidate) -> None:
    module_of(candidate, "layers.1.mlp.fc1").sums_gradients = False


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="mcore-bridge",
    sources=("https://github.com/modelscope/mcore-bridge/pull/173", "https://github.com/OpenPipe/ART/pull/619"),
    case=ADAPTED,
    patch=patch,
    expected=Expected(
        "layers.1.mlp.fc1",
        "grad_input",
        "missing all-reduce",
        "tp",
        line="AllReduce.apply(self.a(x), False, self.sums_gradients",
        operation="AllReduce",
    ),
)
