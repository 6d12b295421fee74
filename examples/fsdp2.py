"""FSDP2 with gradient accumulation. Run alone, this is the reference: it runs the microbatches of all ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ttrace  # 1

HIDDEN, NUM_LAYERS, NUM_MICROBATCHES = 32, 3, 4
DP = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"

if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)) for _ in range(NUM_LAYERS)))
model.to(DEVICE)
if DP > 1:
    mesh = init_device_mesh(DEVICE, (DP,), mesh_dim_names=("dp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = ttrace.attach(model, optimizer)  # 2
for step in range(10):
    with session.step():  # 3
        for _ in range(NUM_MICROBATCHES // DP):
            x, y = torch.randn(2, 4, HIDDEN, device=DEVICE)
            x, y = session.batch((x, y))  # 4
            loss = F.mse_loss(model(x), y) * DP / NUM_MICROBATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
if DP > 1:
    dist.destroy_process_group()
