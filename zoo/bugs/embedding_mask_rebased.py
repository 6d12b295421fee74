"""Vocabulary parallelism: the mask of foreign tokens is taken from ids that were rebased already.

Slapo's hook after the embedding got the ids that its hook before it had rebased, and compared them with the global
range again. On the first rank nothing is masked, so foreign tokens add its row 0; on all others everything is. The loss
is off by half a percent and may even be lower.
"""

from __future__ import annotations

import torch
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
        start = dist.get_rank() * len(weight)

        def is_foreign(numbers: torch.Tensor) -> torch.Tensor:
            return (numbers < start) | (numbers >= start + len(weight))

        rebased = (ids.to_local() - start).masked_fill(is_foreign(ids.to_local()), 0)
        out = F.embedding(rebased, weight).masked_fill(is_foreign(rebased)[..., None], 0.0)  # is_foreign(ids) is right
        return DTensor.from_local(out, ids.device_mesh, [Partial()], run_check=False)

    tok.forward = forward


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="slapo before 07e474a",
    sources=("https://github.com/awslabs/slapo/pull/80",),
    paper=1,
    case=small("tp"),
    patch=patch,
    expected=Expected("tok", "output", "wrong lookup", line="masked_fill(is_foreign(rebased)", operation="masked_fill"),
)
