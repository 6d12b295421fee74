"""The training script that `python -m bench damage` disturbs: a small model under DDP, or alone."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import ttrace


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
    if "--bug" in sys.argv:
        model[3].weight.register_hook(lambda gradient: 1.5 * gradient)  # type: ignore[index]  # a Sequential
    is_parallel = "WORLD_SIZE" in os.environ
    if is_parallel:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ttrace.attach(model, optimizer)
    num_microbatches = 1 if is_parallel else 2  # a rank of two has one of them, and DDP averages
    for _ in range(8):
        optimizer.zero_grad()
        with session.step():
            for _ in range(num_microbatches):
                inputs, targets = session.batch((torch.randn(8, 16), torch.randn(8, 16)))
                (nn.functional.mse_loss(model(inputs), targets) / num_microbatches).backward()
            optimizer.step()
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
