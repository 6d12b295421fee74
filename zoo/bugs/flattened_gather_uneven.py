"""DTensor in torch 2.13: gathering a dim that two axes cut unevenly loses rows and inserts padding.

Where both axes of a mesh cut the same dim, torch gathers over the flattened mesh at once, and then takes the parts for
equally long. Five rows on four ranks come back as other rows. It is right before 2.11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE
from zoo.harness.candidate import Candidate, Cell, simple
from zoo.harness.small import Small
from zoo.harness.transformer import Shape


class Gathered(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if isinstance(weight, DTensor):
            whole = [Replicate()] * 2
            weight = weight.redistribute(weight.device_mesh, whole).to_local(grad_placements=whole)
        return F.linear(x, weight)


def model(shape: Shape) -> nn.Module:
    narrow = Gathered(shape.hidden, shape.ffn, bias=False)
    return nn.Sequential(nn.Embedding(shape.vocab, shape.hidden), narrow, nn.Linear(shape.ffn, shape.vocab))


def distributed(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh["a", "b"]._flatten("ab")
    whole: Any = model(shape)
    whole[1].weight = nn.Parameter(distribute_tensor(whole[1].weight.detach(), mesh, [Shard(0), Shard(0)]))
    return simple(whole, shape, cell)


def case(num_rows: int) -> Small:
    return Small(Cell("own", 4), replace(SHAPE, ffn=num_rows), distributed, model)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.WRONG_COMMUNICATION,
    package="torch 2.13.0",
    sources=("https://github.com/pytorch/pytorch/pull/194457",),
    case=case(5),
    clean_case=case(8),
    expected=Expected("1", "output", "moved", line="weight.redistribute(", operation="all_gather"),
    since=(2, 11),
)
