"""Trains with Lightning Fabric: the global batch is split over the ranks of DDP or FSDP2."""

import argparse
from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from tiny import BATCH, NUM_MICROBATCHES, WORLD, Sentences, change_eps, make_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--bug", choices=["sync", "eps"])
options = parser.parse_args()


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


sharded = ModelParallelStrategy(shard, data_parallel_size=WORLD, tensor_parallel_size=1)
strategy = "auto" if WORLD == 1 else sharded if options.fsdp else "ddp"
fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
fabric.launch()

model = make_model()
if options.bug == "eps":
    change_eps(model, fabric.global_rank)
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(Sentences(), batch_size=BATCH * NUM_MICROBATCHES // WORLD, shuffle=True))

model.train()
for batch in loader:
    optimizer.zero_grad()
    with fabric.no_backward_sync(model) if options.bug == "sync" else nullcontext():
        loss = model(**batch).loss
        fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
