"""Every parallelism of plain PyTorch: clean runs pass, faults are found where they are, recording changes no bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ttrace.judge.verdict import Exit
from zoo.harness.candidate import Cell
from zoo.harness.cells import LAYOUTS, SHAPE, shape_of
from zoo.harness.cover import all_cells, pairs, pairwise
from zoo.harness.faults import FAULTS, faults_of
from zoo.harness.limits import HANG
from zoo.harness.matrix import run_cells
from zoo.harness.ranks import on_ranks
from zoo.harness.results import Result, table

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

MATRIX = Path(__file__).parents[2] / "docs" / "reference" / "matrix.md"


def chosen_cells(config: pytest.Config) -> list[Cell]:
    """All cells, or a cover; those with the same reference side by side."""
    cells = all_cells() if config.getoption("--all") else pairwise(all_cells())
    shapes = [shape_of(cell, SHAPE) for cell in cells]
    keys = [(shape.experts, shape.tied, str(cell.dtype)) for shape, cell in zip(shapes, cells, strict=True)]
    return [cell for _, cell in sorted(zip(keys, cells, strict=True), key=lambda pair: pair[0])]


def cells_in_ci(cells: Sequence[Cell]) -> set[str]:
    """The few cells that recompute, and one of each layout, with the fault and settings that are the rarest so far."""
    faults = dict(zip(cells, chosen_faults(cells), strict=True))
    seen: Counter[object] = Counter()
    names = {cell.name for cell in cells if cell.recompute != "none"}
    for layout in dict.fromkeys(cell.layout for cell in cells):
        settings = {
            cell: (faults[cell], cell.recompute, cell.dtype, cell.num_microbatches)
            for cell in cells
            if cell.layout == layout
        }
        rarest = min(settings, key=lambda cell: [seen[setting] for setting in settings[cell]])
        seen.update(settings[rarest])
        names.add(rarest.name)
    return names


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
def results(
    request: pytest.FixtureRequest, selected: Callable[[str], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """All selected cells, in one launch for each number of ranks."""
    found: dict[str, Result] = {}
    cells = chosen_cells(request.config)
    faults = dict(zip(cells, chosen_faults(cells), strict=True))
    names = selected("name")
    cells = [cell for cell in cells if cell.name in names]
    references: dict[Any, Path] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        mine = [cell for cell in cells if cell.num_ranks == num_ranks]
        timeout = HANG + 60 * num_ranks * len(mine)
        arguments = (folder, mine, [faults[cell] for cell in mine], references)
        results, references = on_ranks(num_ranks, run_cells, *arguments, timeout=timeout)[0]
        found |= results
    if request.config.getoption("--all") and len(found) == len(all_cells()):
        MATRIX.write_text(table({cell.name: found[cell.name] for cell in all_cells()}))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        cells = chosen_cells(metafunc.config)
        in_ci, nightly = cells_in_ci(cells), [pytest.mark.nightly]
        metafunc.parametrize(
            "name", [pytest.param(cell.name, marks=[] if cell.name in in_ci else nightly) for cell in cells]
        )


@pytest.mark.timeout(3 * 3600)
def test_a_clean_cell_passes(results: dict[str, Result], name: str) -> None:
    clean = results[name].clean
    assert clean is not None
    assert clean.exit is Exit.PASSED, clean.trouble
    assert clean.communication == (), "its collectives are right"


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
