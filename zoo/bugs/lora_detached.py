"""LoRA under tensor parallelism: what an adapter adds is gathered by a function that autograd does not know.

Where Megatron leaves the sum over tensor-parallel ranks to the dispatcher of experts, the bridge gathered the adapter's
output by itself, by a collective without a gradient. The forward is right, and the adapter learns nothing: its factors
get no gradient, and the layers before lose the part of their gradient that goes through it.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.lora import ADAPTED


def patch(candidate: Candidate) -> None:
    module_of(candidate, "layers.1.mlp.fc2").b.register_forward_hook(lambda *call: call[-1].detach())


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.WRONG_COMMUNICATION,
    package="Megatron-Bridge",
    sources=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634",),
    case=ADAPTED,
    patch=patch,
    expected=Expected(
        "layers.1.mlp.fc2", "grad_input", "miscounted part", line="call[-1].detach()", operation="detach"
    ),
)
