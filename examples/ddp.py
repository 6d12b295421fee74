"""DDP as most scripts use it: the global batch is split over the ranks. Run alone, this is the reference.

`--bug ignored` excludes one parameter from DDP, `--bug loss` divides the loss by the wrong batch size, and `--bug norm`
normalises the rows of each rank separately. The four lines for TTrace are numbered. There are no annotations.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttrace  # 1

WORLD, GLOBAL_BATCH, NUM_CLASSES = int(os.environ.get("WORLD_SIZE", "1")), 16, 10
BUG = sys.argv[sys.argv.index("--bug") + 1] if "--bug" in sys.argv else ""
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


class SyncBatchNorm(nn.BatchNorm1d):
    """torch.nn.SyncBatchNorm needs a GPU; this one also runs on a CPU."""

    def forward(self, x):
        if WORLD == 1 or BUG == "norm":
            return super().forward(x)
        sums = all_reduce(torch.stack([x.sum(0), x.square().sum(0)]))
        num_rows = len(x) * WORLD
        mean, square = sums / num_rows
        var = square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * num_rows / (num_rows - 1), self.momentum)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32, bias=False), SyncBatchNorm(32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
model.to(DEVICE)
dataset = TensorDataset(torch.randn(256, 16), torch.randint(NUM_CLASSES, (256,)))
sampler = None
if WORLD > 1:
    dist.init_process_group(dist.get_default_backend_for_device(DEVICE))
    sampler = DistributedSampler(dataset, shuffle=False)
    if BUG == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["3.weight"])
    model = DistributedDataParallel(model)
loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // WORLD, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = ttrace.attach(model, optimizer)  # 2
for step, batch in enumerate(loader):
    with session.step():  # 3
        x, y = session.batch([tensor.to(DEVICE) for tensor in batch])  # 4
        loss = F.cross_entropy(model(x), y, reduction="sum") / (GLOBAL_BATCH if BUG == "loss" else len(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
if WORLD > 1:
    dist.destroy_process_group()
