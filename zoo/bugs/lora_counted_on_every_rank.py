"""LoRA under tensor parallelism: an adapter's output that is complete already is summed over ranks once more.

Where a later step sums what experts make, Megatron's layers leave out their own sum, and return a part. The adapter
beside them still summed by itself, and was added to the part: the later sum has it once for each rank.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.lora import ADAPTED


def patch(candidate: Candidate) -> None:
    module_of(candidate, "layers.1.mlp.fc2").sums_again = True


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="Megatron-Bridge",
    sources=(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6089",
    ),
    case=ADAPTED,
    patch=patch,
    expected=Expected(
        "layers.1.mlp.fc2",
        "output",
        "miscounted part",
        line="AllReduce.apply(self.b(inner), self.sums_again",
        operation="all_reduce",
    ),
)
