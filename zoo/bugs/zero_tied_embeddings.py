"""Sharded optimizer with tied embeddings: first and last stage shard their copies of one weight differently.

Gradients are reduced to their owners over dp, then the two stages add up theirs of the embedding. It lies at opposite
ends of the stages' flat buffers, so that its owners differ: what is reduced is added to what is not. The fix gives it a
bucket of its own, which both stages shard alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE
from zoo.harness.candidate import Candidate, Cell
from zoo.harness.pipeline import pipeline
from zoo.harness.small import Small


def sharded(candidate: Candidate, *, is_alike: bool) -> None:
    """Reduce to owners, add up the embedding's, and gather: on each dp rank its own order of owners if not alike."""
    mesh, model = candidate.mesh, candidate.chunks[0]
    stage, dp = mesh.get_local_rank("pp"), mesh.get_group("dp")
    tied: Any = next(p for name, p in model.named_parameters() if name in ("tok.weight", "output.weight"))
    owner = 0 if is_alike else stage

    def reduce(*_: Any) -> None:
        gradients: list[Any] = [parameter.grad for parameter in model.parameters() if parameter is not tied]
        for gradient in gradients:
            dist.all_reduce(gradient, group=dp)
            gradient /= 2
        whole = tied.grad.clone()
        dist.all_reduce(whole, group=dp)
        if mesh.get_local_rank("dp") == owner:
            tied.grad = whole / 2
        dist.all_reduce(tied.grad, group=mesh.get_group("pp"))
        dist.broadcast(tied.grad, group=dp, group_src=owner)

    candidate.optimizer.register_step_pre_hook(reduce)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.WRONG_COMMUNICATION,
    package="megatron-core 0.4.0-0.5.0",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/656", "https://github.com/NVIDIA/Megatron-LM/issues/844"),
    paper=5,
    case=Small(Cell("pp+dp", 4, num_microbatches=3), SHAPE, pipeline),
    patch=partial(sharded, is_alike=False),
    clean_patch=partial(sharded, is_alike=True),
    is_early=True,
    expected=Expected("tok", "param_grad", "tied copies", line="group_src=owner)", operation="broadcast"),
)
