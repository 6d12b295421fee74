"""DDP training that TTrace watches while it runs, with no reference and no command: what ranks must share is compared.

`--bug flip` flips one bit of one weight on the last rank, as broken memory does, and `--bug data` gives all ranks the
same samples. `--bug seed` is a model that each rank initialises by itself.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttrace  # 1

RANK, WORLD, NUM_CLASSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), 10
BUG = sys.argv[sys.argv.index("--bug") + 1] if "--bug" in sys.argv else ""


def flip(weight):
    with torch.no_grad():
        weight.view(torch.int32)[3, 5] ^= 1 << 20


torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512, 16), torch.randint(NUM_CLASSES, (512,)))
torch.manual_seed(RANK if BUG == "seed" else 0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
sampler = None
if WORLD > 1:
    dist.init_process_group("gloo")
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0) if BUG == "data" else DistributedSampler(dataset)
    model = DistributedDataParallel(model, init_sync=BUG != "seed")
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
monitor = ttrace.watch(model, optimizer, every=10)  # 2
for step, (x, y) in enumerate(loader):
    if step == 25 and BUG == "flip" and RANK == WORLD - 1:
        flip(next(model.parameters()))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 40:
        break
if RANK == 0:
    print(f"ttrace: {monitor.num_checks} checks", *monitor.disagreements, sep="\n")  # 3
if dist.is_initialized():
    dist.destroy_process_group()
