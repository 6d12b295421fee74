"""local_map in torch 2.13: the result of an uneven cut has another global shape on every rank.

It multiplies the local length by the number of ranks: five rows are six on one rank and four on the other. A mean of
per-token losses then is a mean of the ranks' means, and each token's gradient depends on the rank it lies on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import SHAPE
from zoo.harness.small import Small, small


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def whole(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return per_token(logits, labels).mean()


def cut(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parts = [
        DTensor.from_local(t, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(1)])
        for t in (logits, labels)
    ]
    losses = local_map(per_token, [Shard(1)], ([Shard(1)], [Shard(1)]), device_mesh=mesh)(*parts)
    mean: torch.Tensor = losses.mean().full_tensor()
    return mean


def case(length: int) -> Small:
    return small("tp", shape=replace(SHAPE, length=length), loss=cut, trusted_loss=whole)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="torch 2.13.0",
    sources=("https://github.com/pytorch/pytorch/issues/172812",),
    case=case(7),
    clean_case=case(8),
    expected=Expected(
        ".", "loss", "uneven weights", words="a mean of means", line="local_map(per_token", operation="local_map"
    ),
    since=(2, 8),
)
