"""Trains with the loop of Accelerate's README: a prepared model, optimizer, loader and scheduler."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from tiny import BATCH, NUM_MICROBATCHES, WORLD, Sentences, change_eps, make_model
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--bug", choices=["accumulation", "eps"])
options = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
)
steps = NUM_MICROBATCHES // WORLD
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=steps, fsdp_plugin=plugin if options.fsdp and WORLD > 1 else None
)
model = make_model()
if options.bug == "eps":
    change_eps(model, accelerator.process_index)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Sentences(), batch_size=BATCH, shuffle=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        if options.bug == "accumulation":  # Accelerate divides by this already
            loss = loss / steps
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
