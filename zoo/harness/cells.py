"""The matrix: one small transformer under every parallelism, traced and judged.

A cell says how the candidate runs; its reference is the same model in one process with the same microbatches. All cells
of a launch share their references.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import Declarations, SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.verdict import Judgement
from ttrace.layouts.rules import Rules
from zoo.harness.candidate import Candidate, Cell, accumulated
from zoo.harness.context import ring, whole_attention
from zoo.harness.dense import ddp, fsdp, fsdp_tp, hsdp, tp
from zoo.harness.experts import expert_parallel
from zoo.harness.pipeline import INNER, SCHEDULES, pipeline
from zoo.harness.plans import planned
from zoo.harness.results import Outcome
from zoo.harness.runs import NUM_TWINS, SimulatedRank, judge
from zoo.harness.transformer import Shape, Transformer

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

SHAPE = Shape(vocab=48, hidden=16, ffn=24, length=8)
"""The model of the matrix."""
TIED = ("pp+dp",)
"""Pipelines whose first and last stage each have a copy of one weight, so that their gradients must be summed."""
Build = Callable[[Shape], nn.Module]
"""The model of a reference."""
Fault = Callable[[Candidate], None]
"""A change to a candidate before it trains, on every rank."""


@dataclass(frozen=True)
class Traced:
    """A candidate's trace, and the folder of its reference's and the twins'."""

    reference: Path
    candidate: Path


def trace_cell(
    cell: Cell,
    folder: Path,
    shape: Shape,
    references: dict[Any, Path],
    fault: Fault | None = None,
    *,
    build: Build = Transformer,
) -> Traced:
    """On every rank: trace the candidate, and before it the reference unless an earlier cell had the same."""
    torch.manual_seed(0)
    shape = shape_of(cell, shape)
    candidate = LAYOUTS[cell.layout](shape, cell)
    total = cell.num_microbatches * candidate.num_data_ranks
    reference = reference_of(folder, replace(shape, recompute="none"), cell, total, references, build)
    out = folder / f"{cell.name}{'-fault' if fault else ''}"
    plan = planned(out=out, role="candidate", reference=reference / "reference")
    session = attached(candidate, plan.model_copy(update=cell.settings))
    if fault is not None:
        fault(candidate)
    for _ in range(cell.num_steps):
        candidate.step(session)
        candidate.optimizer.zero_grad()
    session.close()
    return Traced(reference, out)


def judge_all(traced: Sequence[Traced], keep: Callable[[Judgement], Any] = Outcome.of) -> list[Any]:
    """On every rank: judge a share of the traces, and tell all ranks. One rank judges all that share a reference."""
    return shared_out(traced, lambda one: keep(judge(one.reference, one.candidate)))


def shared_out(traced: Sequence[Traced], work: Callable[[Traced], Any]) -> list[Any]:
    """On every rank: do something with a share of the traces, and tell all ranks."""
    dist.barrier()  # all traces are complete
    mine = [(i, work(traced[i])) for i in _share(traced)]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [outcome for _, outcome in sorted((pair for share in everyones for pair in share), key=itemgetter(0))]


def _share(traced: Sequence[Traced]) -> list[int]:
    """Which of these traces this rank judges."""
    groups: dict[Path, list[int]] = {}
    for i, one in enumerate(traced):
        groups.setdefault(one.reference, []).append(i)
    shares: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return shares[dist.get_rank()]


def shape_of(cell: Cell, shape: Shape) -> Shape:
    """The model as a cell needs it: stages share no weights, and experts need experts."""
    experts = (shape.experts or 4) if {"moe", "ep"} & set(cell.parts) else 0
    is_tied = cell.layout in TIED or not cell.layout.startswith("pp")
    return replace(shape, recompute=cell.recompute, tied=is_tied, experts=experts)


def attached(candidate: Candidate, plan: Plan) -> TracingSession:
    adapter = Native(candidate.chunks, mesh=candidate.mesh)
    rules = Rules.of(candidate.rules)
    return TracingSession(
        SessionParts(
            plan,
            candidate.chunks,
            candidate.optimizer,
            adapter,
            Declarations(rules=rules, grad_factor=candidate.grad_factor),
        )
    )


def reference_of(
    folder: Path, shape: Shape, cell: Cell, total: int, known: dict[Any, Path], build: Build = Transformer
) -> Path:
    """The traces of the reference and its twins, which the ranks make together."""
    loss = cell.trusted_loss or cell.loss
    key = (build, shape, cell.dtype, total, cell.max_norm, tuple(cell.settings.items()), loss, cell.optimizer)
    if key not in known:
        known[key] = folder / f"reference-{len(known)}"
        for twins in (range(1), range(1, NUM_TWINS + 1)):
            for twin in twins[dist.get_rank() :: dist.get_world_size()]:
                trace_reference(known[key], shape, total, twin, cell, build)
            dist.barrier()  # twins read the reference's trace, and candidates too
    return known[key]


def trace_reference(
    folder: Path,
    shape: Shape,
    total: int,
    twin: int,
    cell: Cell,
    build: Build = Transformer,
    settings: Mapping[str, Any] = {},
) -> None:
    """On one rank: trace the reference or a twin of it; `settings` are what else its plan has."""
    gc.collect()  # an earlier model, of gigabytes perhaps
    torch.manual_seed(0)
    model = build(shape).to(cell.dtype)
    optimizer = cell.optimizer(model.parameters())
    plan = planned(out=folder / "reference", **cell.settings, **settings)
    if twin:
        known = {"role": "twin", "twin": twin, "reference": folder / "reference"}
        plan = plan.model_copy(update={"out": folder / f"twin-{twin}", **known})
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    loss = cell.trusted_loss or cell.loss
    for _ in range(cell.num_steps):
        accumulated(session, model, optimizer, shape, total, max_norm=cell.max_norm, loss=loss)
        optimizer.zero_grad()
    session.close()
