"""A hand-written tensor-parallel stack of MLPs; `--bug` omits one all-reduce in the backward pass.

Run alone, this is the reference; run by torchrun, it is the candidate. The five lines for TTrace are numbered.
"""

import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn

import ttrace  # 1

HIDDEN, NUM_LAYERS, BUGGY_LAYER, TP = 64, 3, 1, int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
RULES = {"*.fc1.*": "out/tp ...", "*.fc1/output": "batch hidden/tp", "*.fc2.weight": "out in/tp"}  # 2


class AllReduce(torch.autograd.Function):
    """Sum over the ranks in the forward pass, in the backward pass, or in neither."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.wanted = backward
        return summed(x, forward)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.wanted), None, None


def summed(x, wanted):
    x = x.clone()
    if wanted and TP > 1:
        dist.all_reduce(x)
    return x


class ColumnParallel(nn.Linear):
    def forward(self, x):
        return super().forward(AllReduce.apply(x, False, not self.bug))


class RowParallel(nn.Linear):
    def forward(self, x):
        return AllReduce.apply(super().forward(x), True, False)


class Block(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = ColumnParallel(HIDDEN, 256 // TP), RowParallel(256 // TP, HIDDEN, bias=False)
        self.fc1.bug = bug

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
if TP > 1:
    dist.init_process_group()
torch.manual_seed(int(os.environ.get("RANK", "0")))  # each rank draws its own parts
layers = [Block("--bug" in sys.argv and i == BUGGY_LAYER) for i in range(NUM_LAYERS)]
model = nn.Sequential(OrderedDict(layers=nn.Sequential(*layers))).to(DEVICE)
torch.manual_seed(0)  # all ranks draw the same data
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ttrace.attach(model, optimizer, mesh={"tp": TP}, rules=RULES)  # 3
for step in range(10):
    optimizer.zero_grad()
    with session.step():  # 4
        x, y = session.batch(tuple(torch.randn(2, 8, HIDDEN, device=DEVICE)))  # 5
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
