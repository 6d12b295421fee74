"""A parallelism that TTrace does not know: each rank has every other column. `--bug` takes the columns in blocks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ttrace  # 1

HIDDEN, WORLD, RANK = 16, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


@ttrace.split  # 2
def dealt(size, rank, world):
    return tuple((i, i + 1) for i in range(rank, size, world))


class Summed(torch.autograd.Function):
    """Sum over the ranks: in the forward pass if `is_forward`, else in the backward pass."""

    @staticmethod
    def forward(ctx, x, is_forward):
        ctx.is_forward = is_forward
        return summed(x) if is_forward else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.is_forward else summed(grad), None


def summed(x):
    x = x.clone()
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Dealt(nn.Linear):
    """A linear layer that takes every other column of its input; the products of the ranks add up."""

    def forward(self, x):
        x = Summed.apply(x, False)
        mine = x.chunk(WORLD, -1)[RANK] if "--bug" in sys.argv else x[..., RANK::WORLD]
        return Summed.apply(super().forward(mine), True)


if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
if WORLD > 1:
    dist.init_process_group()
torch.manual_seed(0)
first = nn.Linear(HIDDEN, HIDDEN)
torch.manual_seed(1 + RANK)  # each rank draws its own columns
model = nn.Sequential(first, Dealt(HIDDEN // WORLD, HIDDEN, bias=False)).to(DEVICE)
torch.manual_seed(0)  # all ranks draw the same data
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ttrace.attach(model, optimizer, mesh={"deal": WORLD}, rules={"1.weight": "out in/deal:dealt"})  # 3
for _ in range(10):
    with session.step():  # 4
        x, y = torch.randn(2, 4, HIDDEN, device=DEVICE)
        x, y = session.batch((x, y))  # 5
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
