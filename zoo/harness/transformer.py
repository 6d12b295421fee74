"""A small pre-LN transformer with usual parts: GQA, SwiGLU, RoPE, tied embeddings, or MoE.

It contains no parallelism: layouts are applied to it from outside. A pipeline stage is the same model without the
modules that it does not own, so that names stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import ttrace


@dataclass(frozen=True)
class Shape:
    vocab: int = 64
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 48
    num_layers: int = 4
    length: int = 16
    experts: int = 0
    tied: bool = True
    recompute: str = "none"
    """none, full (every block), or selective (attention only)."""
    adapt: Callable[[nn.Module], None] | None = None
    """Makes it another model, before anything is parallelised; a stage has only some of the modules."""


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    attend: Attend = staticmethod(causal)

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head = s.hidden // s.heads
        self.wq = nn.Linear(s.hidden, s.hidden, bias=False)
        self.wk = nn.Linear(s.hidden, s.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(s.hidden, s.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(s.hidden, s.hidden, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        b, t, _ = q.shape
        q, k, v = (p.reshape(b, t, -1, self.head).transpose(1, 2) for p in (q, k, v))
        mixed = self.attend(rotated(q, rope), rotated(k, rope), v)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


def rotated(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    cos, sin = rope.to(x.dtype).chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """SwiGLU experts as grouped parameters; rows come sorted by expert, `counts` of them to each."""

    def __init__(self, num: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(num, hidden, ffn) * hidden**-0.5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(num, ffn, hidden) * ffn**-0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = zip(*(local(w).unbind() for w in (self.w1, self.w2, self.w3)), strict=True)
        parts = zip(rows.split(counts.tolist()), weights, strict=True)
        return torch.cat([(F.silu(x @ w1) * (x @ w3)) @ w2 for x, (w1, w2, w3) in parts])


def local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


Run = Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def run_here(experts: Experts, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """All rows pass through all experts of this process."""
    out: torch.Tensor = experts(ttrace.holds(rows, slots, slots.numel()), counts)
    return out


class MixtureOfExperts(nn.Module):
    """Every token goes to its two best experts. A slot is a choice of a token: token x 2 + choice."""

    run: Run = staticmethod(run_here)

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.num = s.experts
        self.router = nn.Linear(s.hidden, s.experts, bias=False)
        self.experts = Experts(s.experts, s.hidden, s.ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        slots = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.num)
        rows = self.run(self.experts, tokens[slots // 2], slots, counts)
        mixed = torch.zeros_like(tokens).index_add(0, slots // 2, rows * weights.flatten()[slots, None])
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(s.hidden), RMSNorm(s.hidden)
        self.attention = Attention(s)
        self.feed_forward = MixtureOfExperts(s) if s.experts else FeedForward(s.hidden, s.ffn)
        self.selective = s.recompute == "selective"

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        if self.selective:
            x = x + checkpoint(self.attention, h, rope, use_reentrant=False)
        else:
            x = x + self.attention(h, rope)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """The model, or the stage of it that owns these layers."""

    rope: torch.Tensor

    def __init__(self, s: Shape, layers: Iterable[int] | None = None) -> None:
        super().__init__()
        owned = list(range(s.num_layers) if layers is None else layers)
        self.s = s
        self.tok = nn.Embedding(s.vocab, s.hidden) if 0 in owned else None
        self.layers = nn.ModuleDict({str(i): Block(s) for i in owned})
        is_last = s.num_layers - 1 in owned
        self.norm = RMSNorm(s.hidden) if is_last else None
        self.output = nn.Linear(s.hidden, s.vocab, bias=False) if is_last else None
        if s.tied and self.tok is not None and self.output is not None:
            self.output.weight = self.tok.weight
        self.register_buffer("rope", rope_table(s.length, s.hidden // s.heads), persistent=False)
        if s.adapt is not None:
            s.adapt(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tok(x) if self.tok is not None else x
        for layer in self.layers.values():
            if self.s.recompute == "full":
                h = checkpoint(layer, h, self.rope, use_reentrant=False)
            else:
                h = layer(h, self.rope)
        if self.norm is None or self.output is None:
            return h
        out: torch.Tensor = self.output(self.norm(h))
        return out


def rope_table(length: int, head: int) -> torch.Tensor:
    angle = torch.arange(length)[:, None] / 100.0 ** (torch.arange(head // 2) / (head // 2))
    return torch.cat([angle.cos(), angle.sin()], -1)
