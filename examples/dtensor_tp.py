"""DTensor tensor parallelism without any annotation for TTrace; `--bug` mislabels one gradient.

The gated layers compute on local tensors, as MoE experts do. `to_local` must state that its incoming gradient is
a partial sum. Otherwise DTensor takes it for the whole gradient: no crash, the same loss, wrong gradients below.
"""

import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import ttrace  # 1

VOCAB, HIDDEN, NUM_LAYERS, BUGGY_LAYER, TP = 96, 32, 3, 1, int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


class Gated(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.gradient = None if bug else [Partial()]

    def forward(self, x):
        if not isinstance(x, DTensor):
            return F.linear(F.silu(F.linear(x, self.gate.weight)) * F.linear(x, self.up.weight), self.down.weight)
        local = x.to_local(grad_placements=self.gradient)  # the bug: --bug passes None
        up, gate, down = (layer.weight.to_local() for layer in (self.up, self.gate, self.down))
        out = F.linear(F.silu(F.linear(local, gate)) * F.linear(local, up), down)
        return DTensor.from_local(out, x.device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


class Block(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.gated = Gated(bug)

    def forward(self, x):
        x = x + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        return x + self.gated(self.norm2(x))


if DEVICE != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
layers = [Block("--bug" in sys.argv and i == BUGGY_LAYER) for i in range(NUM_LAYERS)]
parts = {"embed": nn.Embedding(VOCAB, HIDDEN), "layers": nn.Sequential(*layers), "head": nn.Linear(HIDDEN, VOCAB)}
model = nn.Sequential(OrderedDict(parts)).to(DEVICE)
if TP > 1:
    mesh = init_device_mesh(DEVICE, (TP,), mesh_dim_names=("tp",))
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(NUM_LAYERS):
        plan |= {f"layers.{i}.fc1": ColwiseParallel(), f"layers.{i}.fc2": RowwiseParallel()}
        plan |= {f"layers.{i}.gated.{name}": ColwiseParallel() for name in ("up", "gate")}
        plan |= {f"layers.{i}.gated.down": RowwiseParallel()}
        plan |= {f"layers.{i}.gated": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
# Not foreach, which is the default on accelerators: it takes no DTensors beside other tensors.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
session = ttrace.attach(model, optimizer)  # 2
for step in range(10):
    with session.step():  # 3
        ids, labels = session.batch(tuple(torch.randint(VOCAB, (2, 2, 16), device=DEVICE)))  # 4
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
if TP > 1:
    dist.destroy_process_group()
