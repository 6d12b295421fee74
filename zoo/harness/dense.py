"""Layouts of the small transformer with DTensor, FSDP2 and DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from zoo.harness.candidate import Candidate, Cell, default_device_type, simple
from zoo.harness.transformer import Shape, Transformer


def tensor_parallel(
    model: Transformer, mesh: DeviceMesh, *, sequence: bool = False, whole_logits: bool = True
) -> Transformer:
    """Megatron's cuts as DTensor placements, with or without sequence parallelism."""
    stream = Shard(1) if sequence else Replicate()
    outer: dict[str, Any] = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Replicate() if whole_logits else Shard(-1),
            use_local_output=whole_logits,
        ),
    }
    if sequence:
        outer["norm"] = SequenceParallel()
    parallelize_module(model, mesh, {name: style for name, style in outer.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.wo", "feed_forward.w2")}
        if sequence:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
            whole, cut = (Replicate(), None), (Shard(1), None)
            plan["attention"] = PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole)
            plan["feed_forward"] = PrepareModuleInput(input_layouts=cut[:1], desired_input_layouts=whole[:1])
        parallelize_module(block, mesh, plan)
    if model.s.tied and model.tok is not None and model.output is not None:
        model.output.weight = model.tok.weight
    return model


def sharded(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh(default_device_type(), (cell.num_ranks,), mesh_dim_names=("tp",))
    cut_loss = cell.layout == "tp+loss"
    model = tensor_parallel(
        Transformer(shape).to(cell.dtype), mesh, sequence=cell.layout == "tp+sp", whole_logits=not cut_loss
    )
    return simple(model, shape, cell, loss_region=loss_parallel if cut_loss else nullcontext)


def fsdp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh(default_device_type(), (cell.num_ranks,), mesh_dim_names=("dp",))
    return simple(sharded(Transformer(shape).to(cell.dtype), mesh), shape, cell, num_data_ranks=cell.num_ranks)


def hsdp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh(default_device_type(), (2, cell.num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    return simple(sharded(Transformer(shape).to(cell.dtype), mesh), shape, cell, num_data_ranks=cell.num_ranks)


def fsdp_tp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh(default_device_type(), (2, cell.num_ranks // 2), mesh_dim_names=("dp", "tp"))
    model = sharded(tensor_parallel(Transformer(shape).to(cell.dtype), mesh["tp"]), mesh["dp"])
    return simple(model, shape, cell, num_data_ranks=2)


def ddp(shape: Shape, cell: Cell) -> Candidate:
    model = DistributedDataParallel(Transformer(shape).to(cell.dtype))
    optimizer = None
    if cell.layout == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return simple(model, shape, cell, num_data_ranks=cell.num_ranks, optimizer=optimizer)
