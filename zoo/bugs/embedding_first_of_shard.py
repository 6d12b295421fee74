"""Vocabulary parallelism: the first token of every shard has no embedding.

The fix of Slapo's mask treats a rebased id of 0 as the mark of a foreign token. The first row of each shard is a token
too: it is embedded as zeros, and its row never learns. Its own test draws ids from 1 on.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import module_of
from zoo.harness.candidate import Candidate
from zoo.harness.small import small


def patch(candidate: Candidate) -> None:
    tok = module_of(candidate, "tok")

    def forward(ids: DTensor) -> DTensor:
        weight = tok.weight.to_local()
        rebased = ids.to_local() - dist.get_rank() * len(weight)
        rebased = rebased.masked_fill((rebased < 0) | (rebased >= len(weight)), 0)
        out = F.embedding(rebased, weight).masked_fill((rebased == 0)[..., None], 0.0)
        return DTensor.from_local(out, ids.device_mesh, [Partial()], run_check=False)

    tok.forward = forward


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="slapo since 07e474a",
    sources=("https://github.com/awslabs/slapo/pull/80",),
    case=small("tp"),
    patch=patch,
    expected=Expected("tok", "output", "some rows", line="masked_fill((rebased == 0)", operation="masked_fill"),
)
