"""Cells of the matrix on ranks: each clean, with a fault, and with recording off and on."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttrace.attach import DisabledSession
from ttrace.capture.plan import Plan
from ttrace.judge.notes import note_communication
from ttrace.trace.reader import Trace
from zoo.harness.candidate import Candidate, Cell
from zoo.harness.cells import LAYOUTS, SHAPE, Traced, attached, shape_of, shared_out, trace_cell
from zoo.harness.faults import faults_of, inject
from zoo.harness.results import Outcome, Result
from zoo.harness.runs import judge

NUM_TOGETHER = 12
"""So many cells are traced before they are judged: their traces lie on disk until then."""


def run_cells(
    folder: Path, cells: Sequence[Cell], faults: Sequence[str], references: dict[Any, Path]
) -> tuple[dict[str, Result], dict[Any, Path]]:
    """On every rank: each cell clean, with its fault, and with recording off and on."""
    results: dict[str, Result] = {}
    for start in range(0, len(cells), NUM_TOGETHER):
        together = slice(start, start + NUM_TOGETHER)
        results |= run_together(folder, dict(zip(cells[together], faults[together], strict=True)), references)
    return results, references


def run_together(folder: Path, cells: dict[Cell, str], references: dict[Any, Path]) -> dict[str, Result]:
    results, traced = {}, []
    for cell, fault in cells.items():
        module = faults_of(cell)[fault]
        broken = functools.partial(inject, fault, module)
        traced += [trace_cell(cell, folder, SHAPE, references, change) for change in (None, broken)]
        results[cell.name] = Result(fault, module, changed_by_recording(cell, folder))
    outcomes = shared_out(traced, _judge_with_notes)
    for result, clean, wrong in zip(results.values(), outcomes[::2], outcomes[1::2], strict=True):
        result.clean, result.broken = clean, wrong
    if dist.get_rank() == 0:
        for one in traced:
            shutil.rmtree(one.candidate)
    return results


def _judge_with_notes(one: Traced) -> Outcome:
    noted = tuple(note_communication(Trace(one.candidate)))
    return replace(Outcome.of(judge(one.reference, one.candidate)), communication=noted)


def changed_by_recording(cell: Cell, folder: Path) -> list[str]:
    """Two steps with and without a session, from the same start on the same data; what differs on any rank."""
    ends = []
    for recording in (False, True):
        torch.manual_seed(1)
        candidate = LAYOUTS[cell.layout](shape_of(cell, SHAPE), cell)
        plan = Plan(out=folder / f"{cell.name}-neutral", num_steps=2, parameters="own", stop=False)
        session: Any = attached(candidate, plan) if recording else DisabledSession()
        session.batch = lambda batch: batch
        torch.manual_seed(2)
        for _ in range(2):
            candidate.step(session)
        session.close()
        ends.append(dict(state_of(candidate)))
    mine = [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return sorted({name for names in everyones for name in names})


def state_of(candidate: Candidate) -> Any:
    for i, chunk in enumerate(candidate.chunks):
        for name, parameter in chunk.named_parameters():
            for key, tensor in (("", parameter), (".grad", parameter.grad)):
                if tensor is not None:
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                    yield f"{i}.{name}{key}", local.detach().clone()
