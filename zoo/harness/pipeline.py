"""Pipeline stages of the small transformer, with TP or FSDP2 inside them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pp
from torch.nn.parallel import DistributedDataParallel

from ttrace.capture.session import TracingSession
from zoo.harness.candidate import Candidate, Cell, data, default_device_type
from zoo.harness.dense import sharded, tensor_parallel
from zoo.harness.transformer import Shape, Transformer


def pipeline(shape: Shape, cell: Cell) -> Candidate:
    """Build one or two stages for each rank, as the schedule needs them, with TP or FSDP2 inside each stage."""
    inner = [axis for axis, words in AXES.items() if words & set(cell.parts)]
    names = ("pp", *inner)
    mesh = init_device_mesh(
        default_device_type(), (cell.num_ranks // 2 ** len(inner), *(2 for _ in inner)), mesh_dim_names=names
    )
    kind = SCHEDULES.get(cell.parts[0], pp.Schedule1F1B)
    rank, world = mesh.get_local_rank("pp"), mesh["pp"].size()
    if issubclass(kind, pp.PipelineScheduleSingle):
        indices = [rank]
    elif kind in (SCHEDULES["pp-zbv"], SCHEDULES.get("pp-dualpipev")):
        indices = [rank, 2 * world - 1 - rank]
    else:
        indices = [rank, rank + world]
    num_stages = world * len(indices)
    per_stage = shape.num_layers // num_stages
    models = [Transformer(shape, range(i * per_stage, (i + 1) * per_stage)).to(cell.dtype) for i in indices]
    if "tp" in inner:
        models = [tensor_parallel(model, mesh["tp"]) for model in models]
    if "fsdp" in cell.parts:
        models = [sharded(model, mesh["dp"]) for model in models]
    chunks: list[Any] = [*models]
    if "ddp" in cell.parts:
        chunks = [DistributedDataParallel(model, process_group=mesh.get_group("dp")) for model in models]
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(model, i, num_stages, torch.get_default_device(), group=group)
        for model, i in zip(chunks, indices, strict=True)
    ]
    made: Any = stages[0] if issubclass(kind, pp.PipelineScheduleSingle) else stages
    schedule: Any = kind(made, n_microbatches=cell.num_microbatches, loss_fn=cell.loss)
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-3, foreach=False)

    def step(session: TracingSession) -> None:
        with session.step():
            parts = [session.batch(data(shape)) for _ in range(cell.num_microbatches)]
            ids, labels = (torch.cat([part[key] for part in parts]) for key in ("ids", "labels"))
            inputs = (ids,) if 0 in indices else ()
            targets = {"target": labels} if num_stages - 1 in indices else {}
            schedule.step(*inputs, **targets)
            optimizer.step()

    # FSDP2 and DDP state that they average; without them, the case must average.
    factor = 0.5 if "dp" in cell.parts else None
    return Candidate(chunks, optimizer, step, 2 if "dp" in inner else 1, mesh, None, factor, schedule)


SCHEDULES: dict[str, Any] = {
    "pp-gpipe": pp.ScheduleGPipe,
    "pp-1f1b": pp.Schedule1F1B,
    "pp-interleaved": pp.ScheduleInterleaved1F1B,
    "pp-looped-bfs": pp.ScheduleLoopedBFS,
    "pp-interleaved-zb": pp.ScheduleInterleavedZeroBubble,
    "pp-zbv": pp.ScheduleZBVZeroBubble,
}
if hasattr(pp, "ScheduleDualPipeV"):  # since 2.9
    SCHEDULES["pp-dualpipev"] = pp.ScheduleDualPipeV
INNER = ("pp+tp", "pp+fsdp", "pp+fsdp+tp")
"""The layouts of the matrix that have another parallelism inside their stages."""
AXES = {"dp": {"dp", "ddp", "fsdp"}, "tp": {"tp"}}
"""The axes inside a stage, and the parts of a layout that need them."""
