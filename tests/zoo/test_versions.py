"""Versions: what is measured, and how the page says it."""

from __future__ import annotations

import tomllib

from ttrace.report.health import LAST_TESTED, OLDEST
from ttrace.torch_compat import parse_release
from zoo.harness.torches.environment import ROOT
from zoo.versions.cells import CELLS, EXAMPLES, Cell
from zoo.versions.page import PAGE, Measured

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_asks_for_the_oldest_torch_that_works() -> None:
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in PROJECT["dependencies"]


def test_every_minor_version_of_torch_has_a_cell() -> None:
    releases = [parse_release(torch) for python, torch in CELLS if python == CELLS[0][0]]
    assert releases == [(2, minor) for minor in range(OLDEST[1], LAST_TESTED[1] + 1)]


def test_the_page_says_what_was_measured() -> None:
    """Both are written by `.ci/versions`."""
    assert PAGE.read_text() == Measured.read().format_page()


def test_an_example_that_ends_otherwise_than_it_should_is_bold() -> None:
    right = {example.name: example.expect("2.8.0") for example in EXAMPLES}
    good = Cell("3.11", "2.8.0", 9, 0, (), right, 0)
    bad = Cell("3.11", "2.8.0", 9, 0, (), {**right, "fsdp2": 0}, 0)
    assert good.is_good
    assert bad.unexpected == ["fsdp2"]
    pages = [Measured({("3.11", "2.8.0"): cell}).format_page() for cell in (good, bad)]
    assert ["**" in page for page in pages] == [False, True]
