"""Every parallelism of plain PyTorch: clean runs pass, faults are found where they are, recording changes no bit."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ttrace.attach import DisabledSession
from ttrace.capture.plan import Plan
from ttrace.judge.verdict import Exit
from zoo.harness.candidate import Candidate, Cell
from zoo.harness.cells import LAYOUTS, SHAPE, attached, judge_all, shape_of, trace_cell
from zoo.harness.cover import all_cells, pairs, pairwise
from zoo.harness.faults import FAULTS, faults_of, inject
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks
from zoo.harness.results import Result, table

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

MATRIX = Path(__file__).parents[2] / "docs" / "reference" / "matrix.md"
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
    outcomes = judge_all(traced)
    for result, clean, wrong in zip(results.values(), outcomes[::2], outcomes[1::2], strict=True):
        result.clean, result.broken = clean, wrong
    if dist.get_rank() == 0:
        for one in traced:
            shutil.rmtree(one.candidate)
    return results


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


def chosen_cells(config: pytest.Config) -> list[Cell]:
    """All cells, or a cover; those with the same reference side by side."""
    cells = all_cells() if config.getoption("--all") else pairwise(all_cells())
    shapes = [shape_of(cell, SHAPE) for cell in cells]
    keys = [(shape.experts, shape.tied, str(cell.dtype)) for shape, cell in zip(shapes, cells, strict=True)]
    return [cell for _, cell in sorted(zip(keys, cells, strict=True), key=lambda pair: pair[0])]


def chosen_faults(cells: Sequence[Cell]) -> list[str]:
    """One fault a cell; the cells of a layout have its faults in turn, the rare ones first."""
    seen: Counter[str] = Counter()
    chosen = []
    for cell in cells:
        faults = list(reversed(faults_of(cell)))
        chosen.append(faults[seen[cell.layout] % len(faults)])
        seen[cell.layout] += 1
    return chosen


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All cells, in one launch for each number of ranks."""
    found: dict[str, Result] = {}
    cells = chosen_cells(request.config)
    faults = dict(zip(cells, chosen_faults(cells), strict=True))
    references: dict[Any, Path] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        mine = [cell for cell in cells if cell.num_ranks == num_ranks]
        timeout = HANG + 60 * num_ranks * len(mine)
        arguments = (folder, mine, [faults[cell] for cell in mine], references)
        results, references = on_ranks(num_ranks, run_cells, *arguments, timeout=timeout)[0]
        found |= results
    if request.config.getoption("--all"):
        MATRIX.write_text(table({cell.name: found[cell.name] for cell in all_cells()}))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", [cell.name for cell in chosen_cells(metafunc.config)])


@pytest.mark.timeout(3 * 3600)
def test_a_clean_cell_passes(results: dict[str, Result], name: str) -> None:
    clean = results[name].clean
    assert clean is not None
    assert clean.exit is Exit.PASSED, clean.trouble


def test_a_fault_is_found_first_where_it_is(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert result.broken is not None
    assert result.broken.first == result.module, f"{result.fault}: {result.broken.trouble}"


def test_recording_changes_no_bit(results: dict[str, Result], name: str) -> None:
    assert not results[name].changed


def test_every_fault_had_its_cells(results: dict[str, Result]) -> None:
    counts = Counter(result.fault for result in results.values())
    assert set(counts) == {*FAULTS, "unaveraged", "misrouted"}
    assert min(counts.values()) >= 2


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert len(all_cells()) >= 250
    assert {cell.layout for cell in all_cells()} == set(LAYOUTS)


def test_the_cover_has_every_pair_of_settings_and_no_cell_for_nothing() -> None:
    cells, cover = all_cells(), pairwise(all_cells())
    assert 40 <= len(cover) <= len(cells) / 2
    assert {pair for cell in cover for pair in pairs(cell)} == {pair for cell in cells for pair in pairs(cell)}
    assert len(set(cover)) == len(cover)
