"""Small runs, traced in this process without the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import Declarations, SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import judge_candidate
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Judgement
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace
from zoo.harness.gpt import LENGTH, RULES, VOCAB, Gpt
from zoo.harness.plans import planned

NUM_TWINS = 3
Change = Callable[[nn.Module, int], None]
"""Something done to the candidate after the session attached: (model, rank)."""


class SimulatedRank(Native):
    """The native adapter at a given place of a mesh, whatever process group there is."""

    def __init__(self, mesh: Mesh = Mesh(), rank: int = 0) -> None:  # noqa: B008  # meshes are immutable
        self.rank = rank
        self.chunks = []
        self.mesh = mesh
        self.coord = mesh.coord(rank)


def train(plan: Plan, model: nn.Module, adapter: Native, rules: dict[str, str], change: Change | None = None) -> None:
    """Trace the plan's steps of next-token training, each of two microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = TracingSession(SessionParts(plan, model, optimizer, adapter, Declarations(rules=Rules.of(rules))))
    if change is not None:
        with torch.no_grad():
            change(model, adapter.rank)
    for _ in range(plan.num_steps):
        with session.step():
            for _ in range(2):
                batch = {"ids": torch.randint(VOCAB, (2, LENGTH)), "labels": torch.randint(VOCAB, (2, LENGTH))}
                batch = session.batch(batch)
                logits = model(batch["ids"]).float()
                (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


def trace_reference(folder: Path, build: Callable[[], nn.Module], rules: dict[str, str], **settings: Any) -> None:
    """A reference and its twins."""
    plan = planned(out=folder / "reference", **settings)
    train(plan, build(), SimulatedRank(), rules)
    for twin in range(1, NUM_TWINS + 1):
        update = {"out": folder / f"twin-{twin}", "role": "twin", "twin": twin, "reference": folder / "reference"}
        train(plan.model_copy(update=update), build(), SimulatedRank(), rules)


def judge(reference: Path, candidate: Path) -> Judgement:
    """Judge a candidate's trace against a reference's and its twins', which lie beside it."""
    return judge_candidate(measured_twins(reference), Trace(candidate))


@functools.lru_cache(maxsize=4)
def measured_twins(reference: Path) -> ToleranceModel:
    """Measure the tolerances of a reference, once for all candidates that are compared with it."""
    places = (reference / f"twin-{twin}" for twin in range(1, NUM_TWINS + 1))
    twins = [Trace(place) for place in places if place.exists()]  # an isolated reference has one
    return ToleranceModel.measure(Trace(reference / "reference"), twins)


def gpt_case(
    folder: Path, dtype: torch.dtype, seed: int, change: Change | None = None, **settings: Any
) -> Judgement | None:
    """On every rank of a launch: the small GPT, tensor-parallel over all ranks, judged on rank 0."""
    tp = dist.get_world_size()
    torch.manual_seed(seed)
    if dist.get_rank() == 0:
        trace_reference(folder, lambda: Gpt().to(dtype), RULES, seed=seed, **settings)
    dist.barrier()
    known = {"out": folder / "candidate", "role": "candidate", "reference": folder / "reference", "seed": seed}
    plan = Plan.model_validate({**known, "stop": False, **settings})
    model = Gpt(tp).to(dtype)
    train(plan, model, Native([model], mesh={"tp": tp}), RULES, change)
    dist.barrier()
    return judge(folder, folder / "candidate") if dist.get_rank() == 0 else None
