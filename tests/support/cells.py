"""This module is the matrix: one small transformer under every parallelism, traced and judged.

A cell says how the candidate runs; its reference is the same model in one process with the same microbatches. All cells
of a launch share their references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.runs import NUM_TWINS, SimulatedRank, judged
from tests.support.transformer import Shape, Transformer, causal, rope_table
from ttrace.adapters.native import Native
from ttrace.capture.plan import Plan
from ttrace.capture.session import Session
from ttrace.judge.verdict import Judgement
from ttrace.layouts.rules import Rules

BATCH = 2


@dataclass(frozen=True)
class Cell:
    """One way to run the candidate."""

    layout: str
    num_ranks: int = 2
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    num_microbatches: int = 2
    microbatch_grads: bool = False

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layout}-{dtype}-{self.recompute}-{self.num_microbatches}"


@dataclass
class Candidate:
    """A parallelised model, ready to be attached to."""

    chunks: list[nn.Module]
    optimizer: torch.optim.Optimizer
    step: Callable[[Session], None]
    num_data_ranks: int = 1
    mesh: Any = None
    rules: dict[str, str] | None = None
    grad_factor: float | None = None


Fault = Callable[[Candidate], None]
"""Something done to a candidate before it trains, on every rank."""


def run_cell(
    cell: Cell, folder: Path, shape: Shape, references: dict[Any, Path], fault: Fault | None = None
) -> Judgement | None:
    """On every rank: trace the reference once, the candidate, and judge on rank 0."""
    build = LAYOUTS[cell.layout]
    torch.manual_seed(0)
    candidate = build(replace(shape, recompute=cell.recompute, tied=shape.tied and "pp" not in cell.layout), cell)
    total = cell.num_microbatches * candidate.num_data_ranks
    reference = reference_of(
        folder, replace(shape, tied=shape.tied and "pp" not in cell.layout), cell, total, references
    )
    dist.barrier()
    out = folder / f"{cell.name}{'-fault' if fault else ''}"
    plan = Plan(out=out, role="candidate", reference=reference / "reference", stop=False)
    session = attached(candidate, plan.model_copy(update={"microbatch_grads": cell.microbatch_grads}))
    if fault is not None:
        fault(candidate)
    candidate.step(session)
    session.close()
    dist.barrier()
    return judged(reference, out) if dist.get_rank() == 0 else None


def attached(candidate: Candidate, plan: Plan) -> Session:
    adapter = Native(candidate.chunks, candidate.mesh)
    rules = Rules.of(candidate.rules)
    return Session(plan, candidate.chunks, candidate.optimizer, adapter, rules, grad_factor=candidate.grad_factor)


def reference_of(folder: Path, shape: Shape, cell: Cell, total: int, known: dict[Any, Path]) -> Path:
    """The traces of the reference and its twins, made by rank 0 unless an earlier cell had the same."""
    key = (shape, cell.dtype, total, cell.microbatch_grads)
    if key not in known:
        known[key] = folder / f"reference-{len(known)}"
        if dist.get_rank() == 0:
            for twin in range(NUM_TWINS + 1):
                trace_reference(known[key], shape, cell.dtype, total, twin, cell.microbatch_grads)
    return known[key]


def trace_reference(
    folder: Path, shape: Shape, dtype: torch.dtype, total: int, twin: int, microbatch_grads: bool = False
) -> None:
    torch.manual_seed(0)
    model = Transformer(shape).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = Plan(out=folder / "reference", stop=False, microbatch_grads=microbatch_grads)
    if twin:
        known = {"role": "twin", "twin": twin, "reference": folder / "reference"}
        plan = plan.model_copy(update={"out": folder / f"twin-{twin}", **known})
    session = Session(plan, model, optimizer, SimulatedRank(), Rules())
    accumulated(session, model, optimizer, shape, total)
    session.close()


def accumulated(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, num_microbatches: int
) -> None:
    """One step of gradient accumulation."""
    with session.step():
        for _ in range(num_microbatches):
            batch = session.batch(data(shape))
            (loss_of(model(batch["ids"]), batch["labels"]) / num_microbatches).backward()
        optimizer.step()


def data(shape: Shape) -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(shape.vocab, (2, BATCH, shape.length))
    return {"ids": ids, "labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


# The layouts


def simple(
    model: nn.Module, shape: Shape, cell: Cell, *, num_data_ranks: int = 1, optimizer: Any = None, mesh: Any = None
) -> Candidate:
    """A candidate that is trained like the reference."""
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Candidate(
        [model],
        chosen,
        lambda session: accumulated(session, model, chosen, shape, cell.num_microbatches),
        num_data_ranks,
        mesh,
    )


def tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence: bool = False) -> Transformer:
    """Megatron's cuts as DTensor placements, with or without sequence parallelism."""
    stream = Shard(1) if sequence else Replicate()
    outer: dict[str, Any] = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
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
    mesh = init_device_mesh("cpu", (cell.num_ranks,), mesh_dim_names=("tp",))
    model = tensor_parallel(Transformer(shape).to(cell.dtype), mesh, sequence=cell.layout == "tp+sp")
    return simple(model, shape, cell)


def fsdp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh("cpu", (cell.num_ranks,), mesh_dim_names=("dp",))
    return simple(sharded(Transformer(shape).to(cell.dtype), mesh), shape, cell, num_data_ranks=cell.num_ranks)


def hsdp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh("cpu", (2, cell.num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    return simple(sharded(Transformer(shape).to(cell.dtype), mesh), shape, cell, num_data_ranks=cell.num_ranks)


def fsdp_tp(shape: Shape, cell: Cell) -> Candidate:
    mesh = init_device_mesh("cpu", (2, cell.num_ranks // 2), mesh_dim_names=("dp", "tp"))
    model = sharded(tensor_parallel(Transformer(shape).to(cell.dtype), mesh["tp"]), mesh["dp"])
    return simple(model, shape, cell, num_data_ranks=2)


def ddp(shape: Shape, cell: Cell) -> Candidate:
    model = DistributedDataParallel(Transformer(shape).to(cell.dtype))
    optimizer = None
    if cell.layout == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return simple(model, shape, cell, num_data_ranks=cell.num_ranks, optimizer=optimizer)


def context_parallel(shape: Shape, cell: Cell) -> Candidate:
    """The sequence in blocks; attention sees the whole of it by gathering keys and values, or by trading heads."""
    cp, rank = cell.num_ranks, dist.get_rank()
    local = replace(shape, length=shape.length // cp)
    model = Transformer(local).to(cell.dtype)
    model.rope = rope_table(shape.length, shape.hidden // shape.heads).chunk(cp)[rank].clone()
    attend = gathered_attention if cell.layout == "cp-gather" else ulysses_attention
    for block in model.layers.values():
        block.attention.attend = attend  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(session: Session) -> None:
        with session.step():
            for _ in range(cell.num_microbatches):
                batch = session.batch(data(local))
                (loss_of(model(batch["ids"]), batch["labels"]) / cell.num_microbatches).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= cp
            optimizer.step()

    return Candidate([model], optimizer, step, 1, {"cp": cp}, {"./loss": "+cp"}, 1 / cp)


def gathered_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (torch.cat(differentiable.all_gather(t.contiguous()), 2) for t in (k, v))
    first = dist.get_rank() * q.shape[2]
    row, column = torch.arange(q.shape[2])[:, None] + first, torch.arange(k.shape[2])
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=column <= row)


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Trade sequence for heads, attend, and trade back."""
    return traded(causal(traded(q, 1, 2), traded(k, 1, 2), traded(v, 1, 2)), 2, 1)


def traded(x: torch.Tensor, cut: int, join: int) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), cut)]
    received = differentiable.all_to_all([torch.empty_like(part) for part in parts], parts)
    return torch.cat(list(received), join)


def pipeline(shape: Shape, cell: Cell) -> Candidate:
    """One or two stages a rank, as the schedule wants them; with TP or FSDP2 inside each stage."""
    inner = [axis for axis in ("dp", "tp") if axis in INNER.get(cell.layout, ())]
    names = ("pp", *inner)
    mesh = init_device_mesh("cpu", (cell.num_ranks // 2 ** len(inner), *(2 for _ in inner)), mesh_dim_names=names)
    kind = SCHEDULES.get(cell.layout, pp.Schedule1F1B)
    rank, world = mesh.get_local_rank("pp"), mesh["pp"].size()
    if issubclass(kind, pp.PipelineScheduleSingle):
        indices = [rank]
    elif kind in (pp.ScheduleZBVZeroBubble, pp.ScheduleDualPipeV):
        indices = [rank, 2 * world - 1 - rank]
    else:
        indices = [rank, rank + world]
    num_stages = world * len(indices)
    per_stage = shape.num_layers // num_stages
    models = [Transformer(shape, range(i * per_stage, (i + 1) * per_stage)).to(cell.dtype) for i in indices]
    if "tp" in inner:
        models = [tensor_parallel(model, mesh["tp"]) for model in models]
    if "dp" in inner:
        models = [sharded(model, mesh["dp"]) for model in models]
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(model, i, num_stages, torch.device("cpu"), group=group)
        for model, i in zip(models, indices, strict=True)
    ]
    made: Any = stages[0] if issubclass(kind, pp.PipelineScheduleSingle) else stages
    schedule: Any = kind(made, n_microbatches=cell.num_microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-3)

    def step(session: Session) -> None:
        with session.step():
            parts = [session.batch(data(shape)) for _ in range(cell.num_microbatches)]
            ids, labels = (torch.cat([part[key] for part in parts]) for key in ("ids", "labels"))
            inputs = (ids,) if 0 in indices else ()
            targets = {"target": labels} if num_stages - 1 in indices else {}
            schedule.step(*inputs, **targets)
            optimizer.step()

    return Candidate([*models], optimizer, step, 2 if "dp" in inner else 1, mesh)


SCHEDULES: dict[str, Any] = {
    "pp-gpipe": pp.ScheduleGPipe,
    "pp-1f1b": pp.Schedule1F1B,
    "pp-interleaved": pp.ScheduleInterleaved1F1B,
    "pp-looped-bfs": pp.ScheduleLoopedBFS,
    "pp-interleaved-zb": pp.ScheduleInterleavedZeroBubble,
    "pp-zbv": pp.ScheduleZBVZeroBubble,
    "pp-dualpipev": pp.ScheduleDualPipeV,
}
INNER = {"pp+tp": ("tp",), "pp+fsdp": ("dp",), "pp+fsdp+tp": ("dp", "tp")}
LAYOUTS: dict[str, Callable[[Shape, Cell], Candidate]] = {
    "tp": tp,
    "tp+sp": tp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "fsdp+tp": fsdp_tp,
    "ddp": ddp,
    "zero": ddp,
    "cp-gather": context_parallel,
    "cp-ulysses": context_parallel,
    **dict.fromkeys(SCHEDULES, pipeline),
    **dict.fromkeys(INNER, pipeline),
}
