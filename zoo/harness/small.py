"""The case of most entries: the small transformer, or the small hand-written GPT, under one layout."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttrace.capture.plan import Plan
from ttrace.trace.reader import Trace
from zoo.bug import Launcher, Patch
from zoo.harness.breaking import NUM_MICROBATCHES, SHAPE
from zoo.harness.candidate import Candidate, Cell, accumulated
from zoo.harness.cells import LAYOUTS, Build, Traced, attached, reference_of, shape_of, trace_reference
from zoo.harness.gpt import LENGTH, RULES, VOCAB, Gpt
from zoo.harness.plans import planned
from zoo.harness.transformer import Shape, Transformer
from zoo.launch import on_torch, patched

HAND = Shape(vocab=VOCAB, length=LENGTH)
"""What the small GPT, whose tensor parallelism is written by hand, is trained on."""


@dataclass(frozen=True)
class Small:
    """A cell and the model's shape; its own layout and model, if it has them."""

    cell: Cell
    shape: Shape = SHAPE
    layout: Callable[[Shape, Cell], Candidate] | None = None
    build: Build | None = None
    launcher: Launcher = field(default=on_torch, repr=False)

    @property
    def num_ranks(self) -> int:
        return self.cell.num_ranks

    def trace(self, out: Path, references: dict[Any, Path], patch: Patch | None, *, is_early: bool = False) -> Traced:
        """On every rank: trace the candidate, and before it the reference unless an earlier run had the same."""
        gc.collect()
        torch.manual_seed(0)
        candidate, whole, total = self._build()
        reference = reference_of(out.parent, whole, self.cell, total, references, self.build or Transformer)
        plan = planned(out=out, role="candidate", reference=reference / "reference")
        trace_candidate(candidate, plan.model_copy(update=self.cell.settings), patch, is_early=is_early)
        return Traced(reference, out)

    def isolate(self, out: Path, first: Traced, module: str, patch: Patch | None, *, is_early: bool = False) -> Traced:
        """On every rank: trace all of it again, isolated, with the operations of one module."""
        gc.collect()
        torch.manual_seed(0)
        candidate, whole, total = self._build()
        build, settings = self.build or Transformer, {"isolated": True, "inside": (module,)}
        if dist.get_rank() == 0:
            for twin in (0, 1):
                known = {**settings, "reference": first.reference / "reference"}
                trace_reference(out, whole, total, twin, self.cell, build, known)
        dist.barrier()
        torch.manual_seed(0)
        factor = Trace(first.candidate).grad_factor / Trace(first.reference / "reference").grad_factor
        update = {**self.cell.settings, **settings, "grad_factor": factor}
        plan = planned(out=out / "candidate", role="candidate", reference=out / "reference")
        trace_candidate(candidate, plan.model_copy(update=update), patch, is_early=is_early)
        return Traced(out, out / "candidate")

    def _build(self) -> tuple[Candidate, Shape, int]:
        """Build the candidate; return with it the shape of the whole model, and the number of microbatches."""
        cell, shape = self.cell, shape_of(self.cell, self.shape)
        candidate = (self.layout or LAYOUTS[cell.layout])(shape, cell)
        return candidate, replace(shape, recompute="none"), cell.num_microbatches * candidate.num_data_ranks


def small(layout: str, num_ranks: int = 2, *, shape: Shape = SHAPE, **settings: Any) -> Small:
    """Return a case by its layout and the settings of the cell that differ from the defaults."""
    cell = Cell(layout, num_ranks, **{"num_microbatches": NUM_MICROBATCHES, **settings})
    return Small(cell, HAND, by_hand, whole_gpt) if layout == "hand" else Small(cell, shape)


def trace_candidate(candidate: Candidate, plan: Plan, patch: Patch | None, *, is_early: bool = False) -> None:
    """On every rank: attach, break, and train."""
    with patched(patch if is_early else None, candidate):
        session = attached(candidate, plan)
        with patched(None if is_early else patch, candidate):
            for number in range(plan.num_steps):
                if number:
                    candidate.optimizer.zero_grad()
                candidate.step(session)
        session.close()


def whole_gpt(_shape: Shape) -> nn.Module:
    return Gpt()


def by_hand(_shape: Shape, cell: Cell) -> Candidate:
    """The small GPT, tensor-parallel over all ranks."""
    return train_by_hand(Gpt(dist.get_world_size()), cell, RULES)


def train_by_hand(model: Gpt, cell: Cell, rules: dict[str, str]) -> Candidate:
    """A GPT that is tensor-parallel over all ranks, with these layouts."""
    model.to(cell.dtype)
    optimizer = cell.optimizer(model.parameters())

    def step(session: Any) -> None:
        accumulated(session, model, optimizer, HAND, cell.num_microbatches, loss=cell.loss)

    return Candidate([model], optimizer, step, 1, {"tp": dist.get_world_size()}, rules)
