"""A small language model, trained with DDP and gradient accumulation. Nothing in this script mentions TTrace.

One process trains on 4 microbatches per step; two processes train on 2 each, so every step sees the same data.
With --bug, DDP averages the gradients over the processes too early: after the first microbatch, not after the last.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, WIDTH, LENGTH = 64, 32, 16
WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
NUM_MICROBATCHES = 4 // WORLD
BUG = "--bug" in sys.argv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train():
    torch.manual_seed(0)
    model = Model()
    text = torch.randint(VOCAB, (256, LENGTH + 1))
    dataset, sampler = TensorDataset(text[:, :-1], text[:, 1:]), None
    if WORLD > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(dataset)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (tokens, labels) in enumerate(DataLoader(dataset, batch_size=4, sampler=sampler)):
        is_first, is_last = number % NUM_MICROBATCHES == 0, (number + 1) % NUM_MICROBATCHES == 0
        with average_gradients(model, is_first if BUG else is_last):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            (loss / NUM_MICROBATCHES).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.4f}")
    if WORLD > 1:
        dist.destroy_process_group()


def average_gradients(model, is_wanted):
    """DDP averages gradients over the processes in every backward pass, unless `no_sync` tells it not to."""
    return contextlib.nullcontext() if WORLD == 1 or is_wanted else model.no_sync()


if __name__ == "__main__":
    train()
