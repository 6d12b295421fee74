"""Data that were replaced: a note says if the candidate's ranks loaded the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Exit

Rows = dict[str, tuple[str, ...]]
ROWS = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("reference", "candidate", "is_noted"),
    [
        ({"x": ROWS}, ({"x": ("a", "b")}, {"x": ("a", "b")}), True),
        ({"x": ROWS}, ({"x": ("a", "b")}, {"x": ("c", "d")}), False),
        ({"x": ROWS}, ({"x": ("e", "g")}, {"x": ("f", "h")}), False),  # shuffled otherwise
        ({"x": ROWS}, ({"x": ROWS}, {"x": ROWS}), False),  # every rank loads the global batch
        ({"x": ROWS}, ({"x": ("a", "b")}, {}), False),  # fewer rows: only some ranks load
        ({"x": ("a", "a", "b", "c")}, ({"x": ("a", "b")}, {"x": ("a", "b")}), False),  # rows repeat by themselves
        ({"x": ROWS, "y": ("1", "2", "3", "4")}, ({"x": ROWS, "y": ("1", "2")}, {"y": ("1", "2")}), False),
    ],
)
def test_ranks_that_load_the_same_rows_are_noted(
    reference: dict[str, tuple[str, ...]],
    candidate: tuple[dict[str, tuple[str, ...]], ...],
    is_noted: bool,
    tmp_path: Path,
) -> None:
    case = Case(tmp_path, "dp=2")
    case.reference.replaced[0] = {f"0/{slot}": rows for slot, rows in reference.items()}
    for rank, slots in enumerate(candidate):
        case.candidate.replaced[rank] = {f"0/{slot}": rows for slot, rows in slots.items()}
    case.add("0/0/fc/output", draw_tensor(4, 4), "a/dp b")
    judgement = case.judge()
    assert judgement.exit is Exit.PASSED
    notes = [note for note in judgement.notes if note.startswith("the script's own data were replaced")]
    assert len(notes) == is_noted
    if is_noted:
        assert "the reference loaded 4 different rows, the candidate loaded only 2" in notes[0]
