"""Trains a small network with random slopes (RReLU); with `--recompute`, activations are recomputed in backward."""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--recompute", choices=["reentrant", "by-hooks"])
options = parser.parse_args()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.slope = nn.RReLU()

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if options.recompute is None:
            return self.last(self.activate(x))
        return self.last(checkpoint(self.activate, x, use_reentrant=options.recompute == "reentrant"))


torch.manual_seed(0)
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in DataLoader(TensorDataset(*torch.randn(2, 40, 16)), 8):
    mse_loss(model(x.requires_grad_()), y).backward()
    optimizer.step()
    optimizer.zero_grad()
