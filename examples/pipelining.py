"""A pipeline of two stages; `--bug` gives the second stage the labels of the microbatches in the wrong order."""

import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ttrace  # 1

HIDDEN, NUM_LAYERS, NUM_MICROBATCHES = 32, 4, 4
PP, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


def stack(layers):
    """Build these layers, with the names that they have in the whole model."""
    made = {str(i): nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)) for i in layers}
    return nn.Sequential(OrderedDict(made))


def drawn():
    return torch.randn(4, HIDDEN, device=DEVICE), torch.randn(4, HIDDEN, device=DEVICE)


if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
per_stage = NUM_LAYERS // PP
model = stack(range(RANK * per_stage, (RANK + 1) * per_stage)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if PP > 1:
    dist.init_process_group()
    stage = PipelineStage(model, RANK, PP, torch.device(DEVICE))
    schedule = Schedule1F1B(stage, n_microbatches=NUM_MICROBATCHES, loss_fn=F.mse_loss)
session = ttrace.attach(model, optimizer, mesh={"pp": PP})  # 2
for _ in range(10):
    with session.step():  # 3
        batches = [session.batch(drawn()) for _ in range(NUM_MICROBATCHES)]  # 4
        if PP > 1:
            x = torch.cat([x for x, _ in batches])
            y = torch.cat([y for _, y in (reversed(batches) if "--bug" in sys.argv else batches)])
            schedule.step(*([x] if RANK == 0 else []), **({"target": y} if RANK == PP - 1 else {}))
        else:
            for x, y in batches:
                (F.mse_loss(model(x), y) / NUM_MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
if PP > 1:
    dist.destroy_process_group()
