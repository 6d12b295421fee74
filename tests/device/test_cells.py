"""The matrix of parallelisms on the device: clean runs pass, faults are found, recording changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.device_steps import EMU
from ttrace.judge.verdict import Exit
from zoo.harness.candidate import Cell
from zoo.harness.cover import NUM_RANKS
from zoo.harness.faults import faults_of
from zoo.harness.limits import HANG
from zoo.harness.matrix import run_cells
from zoo.harness.ranks import on_ranks
from zoo.harness.results import Result

pytestmark = pytest.mark.slow

CELLS = [
    Cell("ddp"),
    Cell("fsdp", recompute="full"),
    Cell("hsdp", num_ranks=4),
    Cell("tp+sp", dtype=torch.bfloat16),
    Cell("cp-ulysses", recompute="selective"),
    Cell("pp-1f1b", num_microbatches=4),
    Cell("pp-zbv", num_microbatches=4),
    Cell("ep"),
]
"""Those of CI; the others with `--all`."""
OTHERS = [
    Cell(layout, NUM_RANKS.get(layout, 2), dtype, recompute, 4 if layout.startswith("pp") else 2)
    for layout, dtype, recompute in (
        ("tp", torch.float32, "none"),
        ("tp", torch.bfloat16, "full"),
        ("tp+sp", torch.float32, "selective"),
        ("tp+loss", torch.float32, "none"),
        ("fsdp", torch.bfloat16, "none"),
        ("fsdp", torch.float32, "selective"),
        ("hsdp", torch.bfloat16, "full"),
        ("fsdp+tp", torch.float32, "none"),
        ("fsdp+tp", torch.bfloat16, "full"),
        ("ddp", torch.bfloat16, "full"),
        ("zero", torch.float32, "none"),
        ("cp-gather", torch.float32, "none"),
        ("cp-gather", torch.bfloat16, "full"),
        ("cp-ulysses", torch.float32, "none"),
        ("moe+ddp", torch.float32, "none"),
        ("moe+fsdp", torch.float32, "full"),
        ("ep", torch.bfloat16, "none"),
        ("ep+dp", torch.float32, "none"),
        ("pp-gpipe", torch.float32, "none"),
        ("pp-1f1b", torch.bfloat16, "full"),
        ("pp-interleaved", torch.float32, "none"),
        ("pp-interleaved-zb", torch.float32, "none"),
        ("pp-zbv", torch.bfloat16, "none"),
        ("pp+tp", torch.float32, "none"),
        ("pp+fsdp", torch.float32, "none"),
    )
]
LAGS = (0, 1000)
BACKEND = "cpu:gloo,emu:eccl"


def run_on_device(folder: Path, lag: int, cells: Sequence[Cell], faults: Sequence[str]) -> dict[str, Result]:
    """On every rank: run cells on a device of its own."""
    index = dist.get_rank() % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    torch.set_default_device(f"emu:{index}")
    EMU.set_lag(lag)
    return run_cells(folder, cells, faults, {})[0]


def list_cells(config: pytest.Config) -> list[Cell]:
    return [*CELLS, *OTHERS] if config.getoption("--all") else CELLS


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Result]:
    """All cells at both lags, in one launch for each number of ranks."""
    found: dict[tuple[str, int], Result] = {}
    cells = list_cells(request.config)
    faults = {cell: list(faults_of(cell))[i % len(faults_of(cell))] for i, cell in enumerate(cells)}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        mine = [cell for cell in cells if cell.num_ranks == num_ranks]
        for lag in LAGS:
            folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            arguments = (folder, lag, mine, [faults[cell] for cell in mine])
            timeout = HANG + 90 * num_ranks * len(mine)
            made = on_ranks(num_ranks, run_on_device, *arguments, timeout=timeout, backend=BACKEND)[0]
            found |= {(name, lag): result for name, result in made.items()}
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        names = [cell.name for cell in list_cells(metafunc.config)]
        metafunc.parametrize(("name", "lag"), [(name, lag) for name in names for lag in LAGS])


@pytest.mark.timeout(3600)
def test_a_clean_cell_passes(results: dict[tuple[str, int], Result], name: str, lag: int) -> None:
    clean = results[name, lag].clean
    assert clean is not None
    assert clean.exit is Exit.PASSED, clean.trouble


def test_a_fault_is_found_first_where_it_is(results: dict[tuple[str, int], Result], name: str, lag: int) -> None:
    result = results[name, lag]
    assert result.broken is not None
    assert result.broken.first == result.module, f"{result.fault}: {result.broken.trouble}"


def test_recording_changes_no_bit(results: dict[tuple[str, int], Result], name: str, lag: int) -> None:
    assert not results[name, lag].changed
