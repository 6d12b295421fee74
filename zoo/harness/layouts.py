"""A small GPT whose command line selects the layout; `ttrace sweep` is tested on it.

`--bug 14` is the paper's: with float8, gradients of norms are summed over the group in which largest values are shared,
which is that of tp and cp together. Only where tp, cp and float8 meet is that too much, by a factor of tp.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ttrace

VOCAB, HIDDEN, HEADS, LENGTH, NUM_LAYERS = 32, 32, 4, 16, 2
CUT, LOCAL = "batch seq/cp ...", "batch seq/cp hidden/tp"
RULES = {
    **dict.fromkeys(("./batch", "*/input", "*/output"), CUT),
    "*.qkv/output": "batch seq/cp hidden/tp:fused(3)",
    **dict.fromkeys(("*.proj/input", "*.fc1/output", "*.fc2/input"), LOCAL),
    **dict.fromkeys(("*.proj/output", "*.fc2/output", "*.qkv/grad_input", "*.fc1/grad_input"), f"{CUT} +tp"),
    "*.qkv.weight": "out/tp:fused(3) in",
    "*.fc1.weight": "out/tp in",
    **dict.fromkeys(("*.proj.weight", "*.fc2.weight"), "out in/tp"),
    "./loss": "+cp",
}


@dataclass(frozen=True)
class Layout:
    """One command line, and the groups of ranks that it asks for."""

    tp: int = 1
    cp: int = 1
    fp8: bool = False
    recompute: bool = False
    bucket: bool = False
    bug: int = 0
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Which block of the sequence this rank has."""
        return dist.get_rank(self.groups["cp"]) if self.cp > 1 else 0


class Sum(torch.autograd.Function):
    """Adds up over tp, in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, is_forward: bool) -> torch.Tensor:
        ctx.layout, ctx.is_forward = layout, is_forward
        return _over_tp(x, layout) if is_forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grads[0] if ctx.is_forward else _over_tp(grads[0], ctx.layout)), None, None


def _over_tp(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    x = x.clone()
    if layout.tp > 1:
        dist.all_reduce(x, group=layout.groups["tp"])
    return x


class Gather(torch.autograd.Function):
    """The whole sequence of keys or values. torch's own differentiable gather fails on gloo in a part of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout, x = layout, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(layout.cp)]
        dist.all_gather(parts, x, group=layout.groups["cp"])
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.layout.groups["cp"])
        return total.chunk(ctx.layout.cp, 2)[ctx.layout.block], None


class Norm(nn.LayerNorm):
    """With float8, what it gives is cast by one scale for all ranks."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(HIDDEN)
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if not self.layout.fp8:
            return out
        largest = out.detach().abs().amax()
        if self.layout.groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scale = 448.0 / largest
        return out + ((out * scale).to(torch.float8_e4m3fn).to(out.dtype) / scale - out).detach()


class Block(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, tp = layout, layout.tp
        self.norm1, self.norm2 = Norm(layout), Norm(layout)
        self.qkv, self.proj = _linear(HIDDEN, 3 * HIDDEN), _linear(HIDDEN, HIDDEN)
        self.fc1, self.fc2 = _linear(HIDDEN, 4 * HIDDEN), _linear(4 * HIDDEN, HIDDEN)
        if tp > 1:  # every rank has drawn whole layers, and keeps its parts
            place = dist.get_rank(layout.groups["tp"])
            for layer, dim, num_fused in ((self.qkv, 0, 3), (self.proj, 1, 1), (self.fc1, 0, 1), (self.fc2, 1, 1)):
                parts = layer.weight.detach().unflatten(dim, (num_fused, tp, -1)).select(dim + 1, place)
                layer.weight = nn.Parameter(parts.flatten(dim, dim + 1).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._summed(self.proj(self._attended(self.qkv(self._entering(self.norm1(x))))))
        return x + self._summed(self.fc2(F.gelu(self.fc1(self._entering(self.norm2(x))))))

    def _entering(self, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x, self.layout, False)  # type: ignore[no-any-return,no-untyped-call]

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x, self.layout, True)  # type: ignore[no-any-return,no-untyped-call]

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        q, k, v = (part.unflatten(-1, (HEADS // self.layout.tp, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.layout.cp > 1:
            k, v = (Gather.apply(part, self.layout) for part in (k, v))  # type: ignore[no-untyped-call]
        row, column = torch.arange(length)[:, None] + self.layout.block * length, torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=column <= row)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Gpt(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.layers = nn.ModuleList(Block(layout) for _ in range(NUM_LAYERS))
        self.norm, self.head = Norm(layout), _linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.chunk(self.layout.cp)[self.layout.block]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.layout.recompute else layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


def reduce_gradients(model: nn.Module, layout: Layout) -> None:
    """Average over the blocks of the sequence, each gradient by itself or all of a group in one bucket."""
    if layout.cp == 1:
        return
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    amax = dist.group.WORLD if layout.bug == 14 and layout.fp8 else layout.groups["cp"]
    for group, is_norm in ((amax, True), (layout.groups["cp"], False)):
        grads = [p.grad for name, p in model.named_parameters() if (name in norms) is is_norm and p.grad is not None]
        for bucket in [grads] if layout.bucket else [[grad] for grad in grads]:
            _average(bucket, group, layout.cp)


def _average(grads: list[torch.Tensor], group: Any, count: int) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad) / count)


def layout_of(words: Iterable[str] | None = None) -> Layout:
    parser = argparse.ArgumentParser()
    for name in ("tp", "cp", "bug"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Layout, name))
    for name in ("fp8", "recompute", "bucket"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = vars(parser.parse_args(None if words is None else list(words)))
    groups = {}
    if asked["tp"] * asked["cp"] > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (asked["cp"], asked["tp"]), mesh_dim_names=("cp", "tp"))
        groups = {name: mesh.get_group(name) for name in ("cp", "tp")}
    return Layout(**asked, groups=groups)


def main() -> None:
    torch.set_num_threads(1)
    layout = layout_of()
    torch.manual_seed(0)
    model = Gpt(layout).to(torch.bfloat16)  # as float8 is used
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = {"cp": layout.cp, "tp": layout.tp}
    session = ttrace.attach(model, optimizer, mesh=mesh, rules=RULES, grad_factor=1 / layout.cp)
    for _ in range(8):
        with session.step():
            ids, labels = session.batch(tuple(torch.randint(VOCAB, (2, LENGTH // layout.cp)) for _ in range(2)))
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
            reduce_gradients(model, layout)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
