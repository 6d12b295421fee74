"""Every parallelism with its modules isolated: clean runs pass, and a fault spoils nothing but its own module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.candidate import Cell, accumulated
from zoo.harness.cells import LAYOUTS, SHAPE, Fault, attached, shape_of
from zoo.harness.cover import NUM_RANKS
from zoo.harness.faults import inject
from zoo.harness.ranks import on_ranks
from zoo.harness.results import Outcome
from zoo.harness.runs import SimulatedRank
from zoo.harness.transformer import Shape, Transformer

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

FAULTY = "layers.1.attention.wo"
CELLS = [
    Cell("tp", recompute="full"),
    Cell("fsdp", recompute="selective"),
    Cell("cp-ring"),
    Cell("ep"),
    Cell("pp-zbv", num_microbatches=4),
    Cell("fsdp+tp", dtype=torch.bfloat16),
]
"""One of each kind."""
NIGHTLY = [
    Cell("tp+sp"),
    Cell("ddp"),
    Cell("cp-gather"),
    Cell("moe+fsdp"),
    Cell("pp-gpipe", num_microbatches=4),
    Cell("pp+tp", num_microbatches=4),
]
NAMES = [
    *(cell.name for cell in CELLS),
    *(pytest.param(cell.name, marks=pytest.mark.nightly) for cell in NIGHTLY),
]


def references(cell: Cell, folder: Path, shape: Shape) -> None:
    """On every rank: an ordinary and an isolated reference, with the one twin that isolation has."""
    torch.manual_seed(0)
    total = cell.num_microbatches * LAYOUTS[cell.layout](shape, cell).num_data_ranks
    if dist.get_rank() == 0:
        alone = Plan(out=folder / "isolated" / "reference", reference=folder / "reference", isolated=True, stop=False)
        known = {"role": "twin", "twin": 1, "reference": alone.out}
        trace(Plan(out=folder / "reference", stop=False), shape, cell, total)
        trace(alone, shape, cell, total)
        trace(alone.model_copy(update={"out": alone.out.parent / "twin-1", **known}), shape, cell, total)
    dist.barrier()


def isolated(cell: Cell, folder: Path, faults: Sequence[Fault | None]) -> list[Judgement]:
    """On every rank: the ordinary run for its factor, then isolated ones with each fault, judged on rank 0."""
    shape = replace(shape_of(cell, SHAPE), recompute="none")
    references(cell, folder, shape)
    ordinary = Plan(out=folder / "candidate", role="candidate", reference=folder / "reference", stop=False)
    run_candidate(ordinary, shape, cell)
    factor = Trace(ordinary.out).grad_factor
    known, found = folder / "isolated", []
    for number, fault in enumerate(faults):
        update = {"out": known / f"candidate-{number}", "reference": known / "reference"}
        plan = ordinary.model_copy(update={**update, "isolated": True, "grad_factor": factor})
        run_candidate(plan, shape, cell, fault)
        if dist.get_rank() == 0:
            found.append(check(Trace(known / "reference"), [Trace(known / "twin-1")], Trace(plan.out)))
    return found


def trace(plan: Plan, shape: Shape, cell: Cell, total: int) -> None:
    torch.manual_seed(0)
    model = Transformer(shape).to(cell.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    accumulated(session, model, optimizer, shape, total, max_norm=cell.max_norm)
    session.close()


def run_candidate(plan: Plan, shape: Shape, cell: Cell, fault: Fault | None = None) -> None:
    torch.manual_seed(0)
    candidate = LAYOUTS[cell.layout](replace(shape, recompute=cell.recompute), cell)
    session = attached(candidate, plan)
    if fault is not None:
        fault(candidate)
    candidate.step(session)
    session.close()
    dist.barrier()


def run_all(folder: Path, cells: list[Cell]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cell in cells:
        scaled = functools.partial(inject, "scaled", FAULTY)
        judgements = isolated(cell, folder / cell.name, (None, scaled))
        if judgements:
            clean, wrong = judgements
            spoilt = {c.id.name for c in wrong.comparisons if c.verdict.is_wrong and c.id.kind is Kind.OUTPUT}
            found[cell.name] = (clean.exit, Outcome.of(clean).trouble, clean.notes, wrong.findings[0].module, spoilt)
    return found


@pytest.fixture(scope="module")
def results(selected: Callable[[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cells = [cell for cell in (*CELLS, *NIGHTLY) if cell.name in selected("name")]
    for num_ranks in {NUM_RANKS.get(cell.layout, 2) for cell in cells}:
        mine = [replace(c, num_ranks=num_ranks) for c in cells if NUM_RANKS.get(c.layout, 2) == num_ranks]
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        found |= on_ranks(num_ranks, run_all, folder, mine)[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_isolated_modules_are_right_by_themselves(results: dict[str, Any], name: str) -> None:
    passed, trouble, notes, _, _ = results[name]
    assert passed is Exit.PASSED, trouble
    assert not any("could not be isolated" in note for note in notes), notes


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_spoils_only_what_holds_it(results: dict[str, Any], name: str) -> None:
    *_, module, spoilt = results[name]
    assert module == FAULTY
    assert spoilt <= {FAULTY, "layers.1.attention", "layers.1"}
