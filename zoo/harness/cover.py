"""Choice of cells: all of them, or a few in which every pair of settings occurs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from zoo.harness.candidate import Cell
from zoo.harness.cells import LAYOUTS

NUM_RANKS = {
    "hsdp": 4,
    "fsdp+tp": 4,
    "cp-ring+tp": 4,
    "ep+dp": 4,
    "pp+tp": 4,
    "pp+fsdp": 4,
    "pp+fsdp+tp": 8,
}
"""The default is two."""


def all_cells() -> list[Cell]:
    """Every layout with every dtype, recomputation and number of microbatches that it takes."""
    return [cell for layout in LAYOUTS for cell in _cells_of(layout)]


def _cells_of(layout: str) -> Iterator[Cell]:
    counts = (4,) if layout.startswith("pp") else (1, 4)
    dtypes = (torch.float32, torch.bfloat16)
    for count, dtype, recompute in itertools.product(counts, dtypes, ("none", "full", "selective")):
        yield Cell(layout, NUM_RANKS.get(layout, 2), dtype, recompute, count)


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Cells, taken greedily, among which every pair of settings occurs that occurs at all."""
    missing = {pair for cell in cells for pair in pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(missing & pairs(cell)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(cell: Cell) -> frozenset[tuple[object, object]]:
    """All pairs of a cell's settings but that of layout and recomputation, which would take half as many cells again.

    Each layout is recomputed in one way at least, and `--all` has them all.
    """
    settings = (
        ("layout", cell.layout),
        ("dtype", cell.dtype),
        ("recompute", cell.recompute),
        ("microbatches", cell.num_microbatches),
    )
    return frozenset(itertools.combinations(settings, 2)) - {(settings[0], settings[2])}
