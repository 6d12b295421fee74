"""Frameworks: unchanged scripts pass, and bugs that are planted in them are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import ttrace
from zoo.frameworks.outcomes import Outcome, measure_row
from zoo.frameworks.page import PAGE, Measured
from zoo.frameworks.rows import OPTIONS, ROWS, SCRIPTS, TITAN, TORCHRUN, Row
from zoo.harness.with_wheels import run_on

HOW_TO = PAGE.parents[1] / "howto"
IN_CI = [row for row in ROWS if row.is_in_ci]
BUG_AT_NIGHT = ("TRL SFTTrainer", "PEFT LoRA", "Accelerate", "Lightning Fabric", "Ray Train")
"""Frameworks on the stack of the Trainer or of Lightning, whose bugs CI plants; and Ray."""
AT_NIGHT = ("Ray Train",)
"""It starts slowly: its row takes three minutes, and its ranks train with DDP as those of other rows."""
ROWS_OF_CI = [
    pytest.param(row, id=row.name, marks=[pytest.mark.nightly] * (row.framework in AT_NIGHT)) for row in IN_CI
]
GOOD = Outcome(ROWS[0].name, "transformers 1.0", 0, 9, 0, {"items": 1}, {"items": "a/output"}, 1.0)


@pytest.fixture
def commands(request: pytest.FixtureRequest) -> None:
    """Launch a row by the warm server, unless its framework has a launcher of its own: Ray starts most processes."""
    if request.getfixturevalue("row").launcher == TORCHRUN:
        request.getfixturevalue("warm_commands")


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("row", ROWS_OF_CI)
def test_an_unchanged_script_passes_and_its_bug_is_found(row: Row, tmp_path: Path) -> None:
    outcome = measure_row(row, tmp_path / "run", () if row.framework in BUG_AT_NIGHT else row.bugs[:1])
    assert outcome.is_good, outcome


@pytest.mark.nightly
def test_torchtitans_llama_agrees_with_that_of_transformers(tmp_path: Path) -> None:
    """By the map that TTrace brings, with tensor and sequence parallelism on torchtitan's side."""
    candidate = f"{TORCHRUN} {run_on(TITAN)}{SCRIPTS}/titan.py --backend partial_dtensor --tp 2"
    ran = ttrace(
        *("run", *OPTIONS, "--map", "llama-torchtitan", "--out", str(tmp_path / "run")),
        *("--reference", f"python {SCRIPTS}/titan_reference.py", "--candidate", candidate),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1206 tensors: 1206 PASS" in ran.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_good(row: Row, tmp_path: Path) -> None:
    outcome = measure_row(row, tmp_path / "run", row.bugs)
    assert outcome.is_good, outcome


def test_the_page_of_torchtitan_shows_the_row_that_ci_runs() -> None:
    """It is not installed with this project, so nothing else runs the page."""
    row = next(row for row in IN_CI if row.framework == "torchtitan")
    script = f"zoo/frameworks/scripts/{row.script}"
    reference, candidate = f"python {script}", f"{row.launcher} {script} {row.candidate}"
    page = (HOW_TO / "torchtitan.md").read_text()
    for planted in ("", " --bug eps"):
        assert f'ttrace run --reference "{reference}" --candidate "{candidate}{planted}"' in page
    assert all(wheel in page for wheel in TITAN[:2])


def test_ci_runs_every_framework_once() -> None:
    assert set(BUG_AT_NIGHT) < {row.framework for row in IN_CI}
    assert sorted(row.framework for row in IN_CI) == sorted({row.framework for row in ROWS})
    assert len({row.name for row in ROWS}) == len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_script_mentions_ttrace(row: Row) -> None:
    assert row.count_added_lines() == 0


def test_the_page_is_that_of_the_kept_outcomes() -> None:
    measured = Measured.read()
    assert list(measured.outcomes) == [row.name for row in ROWS]
    assert all(outcome.is_good for outcome in measured.outcomes.values())
    assert measured.format_page() == PAGE.read_text()


def test_what_ended_otherwise_than_it_should_is_bold() -> None:
    accused, missed = replace(GOOD, exit=1), replace(GOOD, bugs={"items": 0}, places={})
    assert [outcome.is_good for outcome in (GOOD, accused, missed)] == [True, False, False]
    pages = [Measured({outcome.row: outcome}).format_page() for outcome in (GOOD, accused, missed)]
    assert ["**" in page for page in pages] == [False, True, True]
