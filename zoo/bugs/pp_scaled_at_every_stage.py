"""Pipeline parallelism: gradients are divided by the number of microbatches at every stage that they pass.

DeepSpeed scaled for accumulation in each stage's backward, and so scaled again what the stage after had scaled already:
the k-th stage from the end has gradients that are too small by the k-th power.
"""

from __future__ import annotations

import torch

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import NUM_MICROBATCHES, module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    """Where the first stage ends, the incoming gradient is divided once more."""
    last = module_of(candidate, "layers.1")
    if last is not None:
        forward = last.forward

        def scaled(*args: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = forward(*args)
            out.register_hook(lambda gradient: gradient / NUM_MICROBATCHES)
            return out

        last.forward = scaled


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.SCALING,
    package="DeepSpeed before 0.19.3",
    sources=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8152",
        "https://github.com/deepspeedai/DeepSpeed/pull/8154",
    ),
    case=small("pp-gpipe"),
    patch=patch,
    expected=Expected(
        "layers.1", "grad_output", "constant factor", "mb", line="gradient / NUM_MICROBATCHES", operation="div"
    ),
)
