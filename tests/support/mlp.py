"""What a framework would have: a tensor-parallel MLP that lacks an all-reduce, and a test of it that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ttrace


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: bool, backward: bool) -> torch.Tensor:
        ctx.wanted = backward
        return summed(x, forward)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return summed(grads[0], ctx.wanted), None, None


def summed(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    x = x.clone()
    if wanted:
        dist.all_reduce(x)
    return x


class Mlp(nn.Module):
    def __init__(self, *, bug: bool = False) -> None:
        super().__init__()
        self.bug, hidden = bug, 64 // dist.get_world_size()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, hidden)
        self.down = nn.Linear(hidden, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(Sum.apply(self.norm(x), False, not self.bug))  # type: ignore[no-untyped-call]
        out: torch.Tensor = x + Sum.apply(self.down(torch.relu(hidden)), True, False)  # type: ignore[no-untyped-call]
        return out


RULES = {
    "*.up.*": "out/tp ...",
    "*.up/output": "batch hidden/tp",
    "*.down.weight": "out in/tp",
    "*.down/output": "... +tp",
    "*.up/grad_input": "... +tp",
}


def train() -> None:
    torch.manual_seed(dist.get_rank())  # each rank draws its own parts
    model = nn.Sequential(Mlp(), Mlp(bug=True))
    torch.manual_seed(0)  # all ranks draw the same data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = ttrace.attach(model, optimizer, mesh={"tp": dist.get_world_size()}, rules=RULES)
    for _ in range(8):
        with session.step():
            x, y = session.batch((torch.randn(4, 16), torch.randn(4, 16)))
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_two_ranks_train_like_one(equivalent: Callable[..., None]) -> None:
    equivalent(train, ranks=2)
