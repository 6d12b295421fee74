"""Averages by gloo: reduce_scatter_tensor sums instead, in torch 2.8 and before.

    torchrun --standalone --nproc-per-node 2 gloo_average.py

Needs only torch. Both ranks hold ones, so every average is 1. The gradient of FSDP2 is compared with that of the same
model without FSDP2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def average() -> float:
    output = torch.zeros(1)
    dist.reduce_scatter_tensor(output, torch.ones(dist.get_world_size()), op=dist.ReduceOp.AVG)
    return float(output)


def gradient(*, is_sharded: bool) -> torch.Tensor:
    """The gradient of one layer, on data that is the same on every rank."""
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    if is_sharded:
        fully_shard(model)
    model(batch).square().mean().backward()
    gradient = model.weight.grad
    assert gradient is not None
    return gradient.full_tensor() if is_sharded else gradient  # type: ignore[attr-defined]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ratio = float(gradient(is_sharded=True).norm() / gradient(is_sharded=False).norm())
    found = average()
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}: the average of ones is {found:g}, the gradient is {ratio:g} x the right one")
    dist.destroy_process_group()
