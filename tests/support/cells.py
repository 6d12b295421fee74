"""This module is the matrix: one small transformer under every parallelism, traced and judged.

A cell says how the candidate runs; its reference is the same model in one process with the same microbatches. All cells
of a launch share their references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.candidate import Candidate, Cell, accumulated
from tests.support.context import ring, whole_attention
from tests.support.dense import ddp, fsdp, fsdp_tp, hsdp, tp
from tests.support.experts import expert_parallel
from tests.support.pipeline import INNER, SCHEDULES, pipeline
from tests.support.runs import NUM_TWINS, SimulatedRank, judged
from tests.support.transformer import Shape, Transformer
from ttrace.adapters.native import Native
from ttrace.capture.plan import Plan
from ttrace.capture.session import Session
from ttrace.judge.verdict import Judgement
from ttrace.layouts.rules import Rules

LAYOUTS: dict[str, Callable[[Shape, Cell], Candidate]] = {
    "tp": tp,
    "tp+sp": tp,
    "tp+loss": tp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "fsdp+tp": fsdp_tp,
    "ddp": ddp,
    "zero": ddp,
    "cp-gather": whole_attention,
    "cp-ulysses": whole_attention,
    "cp-ring": ring,
    "cp-ring-plain": ring,
    "cp-ring+fsdp": ring,
    "cp-ring+tp": ring,
    "moe+ddp": ddp,
    "moe+fsdp": fsdp,
    "ep": expert_parallel,
    "ep+dp": expert_parallel,
    **dict.fromkeys(SCHEDULES, pipeline),
    **dict.fromkeys(INNER, pipeline),
}

Fault = Callable[[Candidate], None]
"""Something done to a candidate before it trains, on every rank."""


def run_cell(
    cell: Cell, folder: Path, shape: Shape, references: dict[Any, Path], fault: Fault | None = None
) -> Judgement | None:
    """On every rank: trace the reference once, the candidate, and judge on rank 0."""
    build = LAYOUTS[cell.layout]
    torch.manual_seed(0)
    shape = shape_of(cell, shape)
    candidate = build(shape, cell)
    total = cell.num_microbatches * candidate.num_data_ranks
    reference = reference_of(folder, replace(shape, recompute="none"), cell, total, references)
    dist.barrier()
    out = folder / f"{cell.name}{'-fault' if fault else ''}"
    session = attached(candidate, Plan(out=out, role="candidate", reference=reference / "reference", stop=False))
    if fault is not None:
        fault(candidate)
    candidate.step(session)
    session.close()
    dist.barrier()
    return judged(reference, out) if dist.get_rank() == 0 else None


def shape_of(cell: Cell, shape: Shape) -> Shape:
    """The model as a cell needs it: stages share no weights, and experts need experts."""
    experts = 4 if {"moe", "ep"} & set(cell.parts) else 0
    return replace(shape, recompute=cell.recompute, tied=not cell.layout.startswith("pp"), experts=experts)


def attached(candidate: Candidate, plan: Plan) -> Session:
    adapter = Native(candidate.chunks, candidate.mesh)
    rules = Rules.of(candidate.rules)
    return Session(plan, candidate.chunks, candidate.optimizer, adapter, rules, grad_factor=candidate.grad_factor)


def reference_of(folder: Path, shape: Shape, cell: Cell, total: int, known: dict[Any, Path]) -> Path:
    """The traces of the reference and its twins, made by rank 0 unless an earlier cell had the same."""
    key = (shape, cell.dtype, total, cell.max_norm)
    if key not in known:
        known[key] = folder / f"reference-{len(known)}"
        if dist.get_rank() == 0:
            for twin in range(NUM_TWINS + 1):
                trace_reference(known[key], shape, cell.dtype, total, twin, cell.max_norm)
    return known[key]


def trace_reference(
    folder: Path, shape: Shape, dtype: torch.dtype, total: int, twin: int, max_norm: float | None = None
) -> None:
    torch.manual_seed(0)
    model = Transformer(shape).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = Plan(out=folder / "reference", stop=False)
    if twin:
        known = {"role": "twin", "twin": twin, "reference": folder / "reference"}
        plan = plan.model_copy(update={"out": folder / f"twin-{twin}", **known})
    session = Session(plan, model, optimizer, SimulatedRank(), Rules())
    accumulated(session, model, optimizer, shape, total, max_norm=max_norm)
    session.close()
