"""Sequence parallelism: the gradient of the last norm is never summed over tensor-parallel ranks.

Transformer Engine rewrote its norms as operations and kept `sequence_parallel` on the module, not on the weight.
Megatron's finalize reads it from the weight, and so skips it: each rank has the share of its own part of the sequence,
and the copies drift apart. The loss of the first step is exact.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Replicate

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import at_gradient
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    """Treat the partial sum of each rank as the whole gradient."""

    def wrong(gradient: DTensor) -> DTensor:
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)

    at_gradient(candidate, "norm.weight", wrong)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="Transformer Engine 1.13-2.0",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1446",
        "https://github.com/NVIDIA/TransformerEngine/pull/1528",
    ),
    paper=12,
    case=small("tp+sp"),
    patch=patch,
    expected=Expected(
        "norm",
        "param_grad",
        "missing all-reduce",
        "tp",
        line="DTensor.from_local(gradient.to_local()",
        operation="from_local",
    ),
)
