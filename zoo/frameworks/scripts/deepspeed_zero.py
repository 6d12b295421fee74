"""Trains with DeepSpeed, with any stage of ZeRO; without `--stage`, the same with plain PyTorch in one process.

With `--items` the model itself divides its loss by the number of labels in all microbatches of the rank.
"""

import argparse
import sys

import torch
from tiny import BATCH, LENGTH, NUM_MICROBATCHES, WORLD, Sentences, change_eps, make_model
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--items", action="store_true")
parser.add_argument("--bug", choices=["eps", "loss", "accumulation"])
options = parser.parse_args()

NUM_STEPS, MAX_NORM, MINE = 5, 0.1, NUM_MICROBATCHES // WORLD
rows, model = Sentences(), make_model()
if options.bf16:
    model = model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
items = {"num_items_in_batch": MINE * BATCH * (LENGTH - 1)} if options.items else {}
if options.stage is None:
    loader = iter(DataLoader(rows, BATCH))
    for _ in range(NUM_STEPS):
        for _ in range(NUM_MICROBATCHES):
            loss = model(**next(loader), **items).loss
            (loss if items else loss / NUM_MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    sys.exit()

from deepspeed_on_cpu import deepspeed  # noqa: E402

deepspeed.init_distributed(dist_backend="gloo")
if options.bug == "eps":
    change_eps(model, deepspeed.comm.get_rank())
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": MINE,
    "gradient_clipping": MAX_NORM,
    "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": options.bf16},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
loader = iter(DataLoader(rows, BATCH, sampler=DistributedSampler(rows)))
for _ in range(NUM_STEPS * MINE):
    loss = engine(**next(loader), **items).loss
    if options.bug == "loss" and engine.global_rank == 1:
        loss = 2 * loss
    if options.bug == "accumulation":  # the engine divides by it already
        loss = loss / MINE
    engine.backward(loss, scale_wrt_gas=not items)
    engine.step()
