"""Tensor parallelism: the gradient that leaves the last projection is a partial sum labelled as whole.

torchtitan's chunked cross entropy accumulated the gradients of the hidden states, which each rank has of its part of
the vocabulary only, and called them replicated. Losses agree at step 1; at step 500 they were 2.73 and 2.34.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    output = module_of(candidate, "output")

    def forward(x: DTensor) -> DTensor:
        logits = F.linear(x.to_local(grad_placements=[Replicate()]), output.weight.to_local())  # Partial() is right
        return DTensor.from_local(logits, x.device_mesh, [Shard(-1)], run_check=False)

    output.forward = forward


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="torchtitan",
    sources=("https://github.com/pytorch/torchtitan/pull/3412",),
    case=small("tp"),
    patch=patch,
    expected=Expected(
        "output",
        "grad_input",
        "missing all-reduce",
        "tp",
        line="x.to_local(grad_placements=[Replicate()])",
        operation="to_local",
    ),
)
