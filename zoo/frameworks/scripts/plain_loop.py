"""Trains with DDP and a loop in plain PyTorch; --keep-gradients does not set them to zero."""

import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, WIDTH, BATCH = 48, 16, 8
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

torch.manual_seed(0)
layers = {"words": nn.Embedding(VOCAB, WIDTH), "mix": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, VOCAB)}
model: nn.Module = nn.Sequential(OrderedDict(layers))
text = torch.randint(VOCAB, (64, 9))
dataset, sampler = TensorDataset(text[:, :-1], text[:, 1:]), None
if WORLD > 1:
    dist.init_process_group("gloo")
    sampler = DistributedSampler(dataset)
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens, labels in DataLoader(dataset, batch_size=BATCH // WORLD, sampler=sampler):
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    if "--keep-gradients" not in sys.argv:
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
