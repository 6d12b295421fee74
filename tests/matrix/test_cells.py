"""Every parallelism of plain PyTorch: clean runs pass, faults are found where they are, recording changes no bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.candidate import Candidate, Cell
from tests.support.cells import LAYOUTS, attached, run_cell, shape_of
from tests.support.faults import faults_of, inject
from tests.support.ranks import on_ranks
from tests.support.transformer import Shape
from ttrace.attach import Off
from ttrace.capture.plan import Plan
from ttrace.judge.verdict import Exit, Judgement

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

NUM_RANKS = {"cp-ring+tp": 4, "ep+dp": 4, "hsdp": 4, "fsdp+tp": 4, "pp+tp": 4, "pp+fsdp": 4, "pp+fsdp+tp": 8}
SHAPE = Shape(vocab=48, hidden=16, ffn=24, length=8)


def all_cells() -> list[Cell]:
    """Every layout with every dtype, recomputation and number of microbatches that it takes."""
    cells = []
    for layout in LAYOUTS:
        counts = (4,) if layout.startswith("pp") else (1, 4)
        dtypes = (torch.float32, torch.bfloat16)
        for count, dtype, recompute in itertools.product(counts, dtypes, ("none", "full", "selective")):
            cells.append(Cell(layout, NUM_RANKS.get(layout, 2), dtype, recompute, count))
    return cells


def some_cells(per_layout: int = 1) -> list[Cell]:
    """A few cells of every layout, each with other settings than its neighbours."""
    chosen = []
    for i, layout in enumerate(LAYOUTS):
        cells = [cell for cell in all_cells() if cell.layout == layout]
        few = 1 if NUM_RANKS.get(layout, 2) == 8 else per_layout
        chosen += [cells[(i + 5 * k) % len(cells)] for k in range(few)]
    return chosen


@dataclass
class Result:
    """What a launch found out about one cell."""

    exit: Exit
    trouble: list[str] = field(default_factory=list)
    found: dict[str, str] = field(default_factory=dict)
    """By fault: the module of the first finding."""
    changed: list[str] | None = None
    """Parameters and gradients that differ with recording on."""


def run_cells(folder: Path, cells: list[Cell], thorough: bool) -> dict[str, Result]:
    """On every rank: each cell clean, with a fault, and with recording off and on; in haste the latter two in turn."""
    results: dict[str, Result] = {}
    references: dict[Any, Path] = {}
    for cell in cells:
        judgement = run_cell(cell, folder, SHAPE, references)
        result = Result(judgement.exit, trouble_in(judgement)) if judgement else Result(Exit.PASSED)
        turn = len(results)
        if thorough or turn % 2 == 0:
            faults = list(faults_of(cell).items())
            fault, module = faults[turn // 2 % len(faults)]  # one fault a cell, in turn
            broken: Callable[[Candidate], None] = functools.partial(inject, fault, module)
            wrong = run_cell(cell, folder, SHAPE, references, broken)
            result.found[f"{fault} in {module}"] = wrong.findings[0].module if wrong and wrong.findings else ""
        if thorough or turn % 2 == 1:
            result.changed = changed_by_recording(cell, folder)
        results[cell.name] = result
    return results


def trouble_in(judgement: Judgement) -> list[str]:
    wrong = [c for c in judgement.comparisons if c.verdict.is_wrong or c.spoils]
    return [*judgement.problems, *(f"{c.id} {c.verdict} {c.reason} {c.excess:.2g}" for c in wrong)][:8]


def changed_by_recording(cell: Cell, folder: Path) -> list[str]:
    """Two steps with and without a session, from the same start on the same data."""
    ends = []
    for recording in (False, True):
        torch.manual_seed(1)
        candidate = LAYOUTS[cell.layout](shape_of(cell, SHAPE), cell)
        plan = Plan(out=folder / f"{cell.name}-neutral", num_steps=2, parameters="own", stop=False)
        session: Any = attached(candidate, plan) if recording else Off()
        session.batch = lambda batch: batch
        torch.manual_seed(2)
        for _ in range(2):
            candidate.step(session)
        session.close()
        ends.append(dict(state_of(candidate)))
    return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


def state_of(candidate: Candidate) -> Any:
    for i, chunk in enumerate(candidate.chunks):
        for name, parameter in chunk.named_parameters():
            for key, tensor in (("", parameter), (".grad", parameter.grad)):
                if tensor is not None:
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                    yield f"{i}.{name}{key}", local.detach().clone()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All cells, in one launch for each number of ranks."""
    found: dict[str, Result] = {}
    cells = chosen_cells(request.config)
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        mine = [cell for cell in cells if cell.num_ranks == num_ranks]
        thorough = bool(request.config.getoption("--all"))
        found |= on_ranks(num_ranks, run_cells, folder, mine, thorough, timeout=60 + 30 * len(mine))[0]
    return found


def chosen_cells(config: pytest.Config) -> list[Cell]:
    return all_cells() if config.getoption("--all") else some_cells()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", [cell.name for cell in chosen_cells(metafunc.config)])


@pytest.mark.timeout(3600)
def test_a_clean_cell_passes(results: dict[str, Result], name: str) -> None:
    assert results[name].exit is Exit.PASSED, results[name].trouble


def test_a_fault_is_found_first_where_it_is(results: dict[str, Result], name: str) -> None:
    for fault, module in results[name].found.items():
        assert fault.endswith(f" in {module}"), f"{fault}: found at {module or 'no module'}"


def test_recording_changes_no_bit(results: dict[str, Result], name: str) -> None:
    assert not results[name].changed


def test_every_second_cell_at_least_had_a_fault_and_a_run_without_recording(results: dict[str, Result]) -> None:
    assert 3 * sum(bool(result.found) for result in results.values()) >= len(results)
    assert 3 * sum(result.changed is not None for result in results.values()) >= len(results)


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert len(all_cells()) >= 120
    assert {cell.layout for cell in some_cells()} == set(LAYOUTS)
