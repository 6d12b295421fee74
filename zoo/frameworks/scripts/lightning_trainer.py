"""Trains with Lightning's Trainer: automatic optimisation with accumulation, or manual optimisation; DDP or FSDP2."""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny import BATCH, NUM_MICROBATCHES, WORLD, Sentences, change_eps, make_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--manual", action="store_true")
parser.add_argument("--bug", choices=["loss", "eps"])
options = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()
        self.automatic_optimization = not options.manual

    def configure_model(self):
        if options.bug == "eps":
            change_eps(self.net, self.global_rank)
        if options.fsdp and WORLD > 1:
            for layer in self.net.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        if options.bug == "loss":  # DDP averages the gradients already
            loss = loss / WORLD
        self.log("loss", loss)
        if options.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


num_microbatches = 1 if options.manual else NUM_MICROBATCHES // WORLD
sharded = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD,
    strategy="auto" if WORLD == 1 else sharded if options.fsdp else "ddp",
    accumulate_grad_batches=num_microbatches,
    max_steps=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
rows = BATCH * NUM_MICROBATCHES // WORLD // num_microbatches
trainer.fit(Model(), DataLoader(Sentences(), batch_size=rows, shuffle=True))
