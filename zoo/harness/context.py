"""Context parallelism: keys and values are gathered, heads are exchanged, or torch's ring is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options

from ttrace.capture.session import TracingSession
from zoo.harness.candidate import Candidate, Cell, data, default_device_type, updated
from zoo.harness.dense import sharded, tensor_parallel
from zoo.harness.ring import allow_ring_attention_on_cpu
from zoo.harness.transformer import Shape, Transformer, causal, rope_table


def whole_attention(shape: Shape, cell: Cell) -> Candidate:
    """Cut the sequence into blocks; attention sees all of it by gathering keys and values, or by exchanging heads."""
    cp, rank = cell.num_ranks, dist.get_rank()
    local = replace(shape, length=shape.length // cp)
    model = Transformer(local).to(cell.dtype)
    model.rope = rope_table(shape.length, shape.hidden // shape.heads).chunk(cp)[rank].clone()
    attend = gathered_attention if cell.layout == "cp-gather" else ulysses_attention
    for block in model.layers.values():
        block.attention.attend = attend  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(session: TracingSession) -> None:
        with session.step():
            for _ in range(cell.num_microbatches):
                batch = session.batch(data(local))
                (cell.loss(model(batch["ids"]), batch["labels"]) / cell.num_microbatches).backward()
            average(model.parameters(), dist.group.WORLD)
            updated(model, optimizer, cell.max_norm)

    return Candidate([model], optimizer, step, 1, {"cp": cp}, {"./loss": "+cp"}, 1 / cp)


def ring(shape: Shape, cell: Cell) -> Candidate:
    """torch's context_parallel, with TP inside, with FSDP2 over the same ranks, or reduced by hand."""
    allow_ring_attention_on_cpu()
    has_tp, has_fsdp = "tp" in cell.parts, "fsdp" in cell.parts
    names, inner = (("cp", "tp"), 2) if has_tp else (("cp",), 1)
    mesh = init_device_mesh(default_device_type(), (cell.num_ranks // inner, inner)[: len(names)], mesh_dim_names=names)
    model = Transformer(shape).to(cell.dtype)
    if has_tp:
        tensor_parallel(model, mesh["tp"])
    if has_fsdp:
        sharded(model, mesh["cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(session: TracingSession) -> None:
        with session.step(), load_balance("cp-ring-plain" not in cell.parts):
            for _ in range(cell.num_microbatches):
                batch = session.batch(data(shape))
                ids, labels = batch["ids"], batch["labels"]
                buffers = {"buffers": [ids, labels, model.rope], "buffer_seq_dims": [1, 1, 0]}
                with context_parallel(mesh["cp"], **buffers, no_restore_buffers={ids, labels}):
                    (cell.loss(model(ids), labels) / cell.num_microbatches).backward()
            if not has_fsdp:
                average(model.parameters(), mesh.get_group("cp"))
            updated(model, optimizer, cell.max_norm)

    if has_fsdp:  # it states everything itself
        return Candidate([model], optimizer, step)
    return Candidate([model], optimizer, step, 1, mesh, None, 1 / mesh["cp"].size())


@contextmanager
def load_balance(enabled: bool) -> Iterator[None]:
    """context_parallel takes this setting from a variable of its module."""
    before, _cp_options.enable_load_balance = _cp_options.enable_load_balance, enabled
    try:
        yield
    finally:
        _cp_options.enable_load_balance = before


def average(parameters: Iterable[nn.Parameter], group: Any, divisor: int = 0) -> None:
    """What hand-written parallelism does after the last microbatch; without a group, gradients are sums already."""
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if group is not None and not getattr(parameter, "is_left_out", False):
                dist.all_reduce(local, group=group)
            local /= divisor or dist.get_world_size(group)


def gathered_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (torch.cat(differentiable.all_gather(t.contiguous()), 2) for t in (k, v))
    first = dist.get_rank() * q.shape[2]
    row, column = torch.arange(q.shape[2])[:, None] + first, torch.arange(k.shape[2])
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=column <= row)


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exchange sequence parts for heads, attend, and exchange back."""
    return traded(causal(traded(q, 1, 2), traded(k, 1, 2), traded(v, 1, 2)), 2, 1)


def traded(x: torch.Tensor, cut: int, join: int) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), cut)]
    received = differentiable.all_to_all([torch.empty_like(part) for part in parts], parts)
    return torch.cat(list(received), join)
