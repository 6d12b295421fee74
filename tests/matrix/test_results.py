"""The table of the matrix says what was found, and hides nothing that went wrong."""

from __future__ import annotations

from pathlib import Path

from tests.support.traces import Case, draw_tensor
from zoo.harness.results import Outcome, Result, table

NAME = "0/0/layers.1/output"


def outcome(folder: Path, *, wrong: bool) -> Outcome:
    case = Case(folder)
    case.add(NAME, draw_tensor(4, 8), "a b/tp", (lambda x: 2 * x) if wrong else None)
    return Outcome.of(case.judge())


def test_a_row_says_where_a_fault_was_found(tmp_path: Path) -> None:
    clean, broken = (outcome(tmp_path / str(wrong), wrong=wrong) for wrong in (False, True))
    rows = table({"tp-float32": Result("scaled", "layers.1", [], clean, broken)}).splitlines()
    assert rows[-1] == "| tp-float32 | yes | scaled in layers.1 | there | yes | 1 | 1 | 0 | - |"


def test_what_went_wrong_stands_out(tmp_path: Path) -> None:
    clean, broken = (outcome(tmp_path / str(wrong), wrong=wrong) for wrong in (False, True))
    rows = table({"tp": Result("stale", "layers.2", ["tok.weight"], broken, clean)}).splitlines()
    assert "| **no**: 0/0/layers.1/output FAIL" in rows[-1]
    assert "| **nowhere** | **no**: tok.weight |" in rows[-1]
