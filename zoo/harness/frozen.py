"""The small GPT with tables that are not trained: sinusoidal positions, and a causal mask as a parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zoo.harness.candidate import Candidate, Cell
from zoo.harness.gpt import HIDDEN, LENGTH, RULES, Attention, Gpt
from zoo.harness.small import HAND, Small, train_by_hand
from zoo.harness.transformer import Shape


class MaskedAttention(Attention):
    """Attention whose mask is a frozen parameter, which is added to the scores."""

    def __init__(self, tp: int) -> None:
        super().__init__(tp)
        later = torch.ones(LENGTH, LENGTH).triu(1)
        self.mask = nn.Parameter(-1e4 * later, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (p.reshape(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


class FrozenGpt(Gpt):
    def __init__(self, tp: int = 1) -> None:
        super().__init__(tp)
        self.places.weight = nn.Parameter(make_table(torch.arange(LENGTH)), requires_grad=False)
        for layer in self.layers:
            layer.attention = MaskedAttention(tp)


def make_table(positions: torch.Tensor) -> torch.Tensor:
    """Compute sines and cosines of positions, at frequencies from 1 to 1e-4."""
    angles = positions[:, None] * 1e4 ** (-torch.arange(HIDDEN // 2) / (HIDDEN // 2))
    return torch.cat([angles.sin(), angles.cos()], -1)


def frozen_by_hand(_shape: Shape, cell: Cell) -> Candidate:
    return train_by_hand(FrozenGpt(dist.get_world_size()), cell, RULES)


def whole(_shape: Shape) -> nn.Module:
    return FrozenGpt()


FROZEN = Small(Cell("hand", 2), HAND, frozen_by_hand, whole)
"""The case of entries with frozen tables."""
