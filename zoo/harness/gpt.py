"""A small pre-LN GPT with hand-written tensor parallelism; with tp=1 it is its own reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, HEADS, LENGTH = 61, 32, 4, 12
RULES = {
    "*.qkv.*": "out/tp:fused(3) ...",
    "*.qkv/output": "batch seq hidden/tp:fused(3)",
    "*.proj.weight": "out in/tp",
    "*.proj/input": "batch seq hidden/tp",
    "*.fc1.*": "out/tp ...",
    "*.fc1/output": "batch seq hidden/tp",
    "*.fc2.weight": "out in/tp",
    "*.fc2/input": "batch seq hidden/tp",
}


class AllReduce(torch.autograd.Function):
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


def keep_part(whole: torch.Tensor, dim: int, tp: int, num_fused: int = 1) -> nn.Parameter:
    """Keep this rank's part of a parameter that every rank has drawn as a whole."""
    rank = dist.get_rank() if tp > 1 and dist.is_initialized() else 0
    parts = whole.detach().unflatten(dim, (num_fused, tp, -1)).select(dim + 1, rank)
    return nn.Parameter(parts.flatten(dim, dim + 1).clone())


class Column(nn.Linear):
    def __init__(self, size_in: int, size_out: int, tp: int, num_fused: int = 1) -> None:
        super().__init__(size_in, size_out)
        self.tp, self.out_features = tp, size_out // tp
        self.weight, self.bias = (keep_part(each, 0, tp, num_fused) for each in (self.weight, self.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(AllReduce.apply(x, False, self.tp > 1))  # type: ignore[no-untyped-call]


class Row(nn.Linear):
    def __init__(self, size_in: int, size_out: int, tp: int) -> None:
        super().__init__(size_in, size_out)
        self.tp, self.in_features = tp, size_in // tp
        self.weight = keep_part(self.weight, 1, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = AllReduce.apply(F.linear(x, self.weight), self.tp > 1, False)  # type: ignore[no-untyped-call]
        return out + self.bias


class Attention(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.heads = HEADS // tp
        self.qkv, self.proj = Column(HIDDEN, 3 * HIDDEN, tp, 3), Row(HIDDEN, HIDDEN, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (p.reshape(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = Column(HIDDEN, 4 * HIDDEN, tp), Row(4 * HIDDEN, HIDDEN, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(tp), Mlp(tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Gpt(nn.Module):
    def __init__(self, tp: int = 1, num_layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Block(tp) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out
