"""Versions: what is measured, and how the page says it."""

from __future__ import annotations

import tomllib

from ttrace.compat.torch import parse_release
from ttrace.report.health import LAST_TESTED, OLDEST
from zoo.harness.torches.environment import OWN, ROOT
from zoo.harness.torches.wheels import VERSIONS
from zoo.versions import demo
from zoo.versions.cells import CELLS, EXAMPLES, Cell
from zoo.versions.frameworks import FRAMEWORKS
from zoo.versions.page import PAGE, Measured

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_LANGUAGE = "Programming Language :: Python :: "
PYTHONS = tuple(text.removeprefix(_LANGUAGE) for text in PROJECT["classifiers"] if text.startswith(_LANGUAGE))


def test_the_package_asks_for_the_oldest_torch_that_works() -> None:
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in PROJECT["dependencies"]


def test_every_minor_version_of_torch_has_a_cell() -> None:
    releases = [parse_release(torch) for python, torch in CELLS if python == CELLS[0][0]]
    assert releases == [(2, minor) for minor in range(OLDEST[1], LAST_TESTED[1] + 1)]


def test_the_page_says_what_was_measured() -> None:
    """Both are written by `.ci/versions`."""
    assert PAGE.read_text() == Measured.read().format_page()


def test_every_cell_was_measured_and_those_that_are_supported_are_good() -> None:
    cells = Measured.read().cells
    assert list(cells) == [*((PYTHONS[0], torch) for torch in VERSIONS), *((python, OWN) for python in PYTHONS[1:])]
    assert [key for key, cell in cells.items() if cell.is_supported and not cell.is_good] == []


def test_every_framework_was_measured_and_is_good() -> None:
    outcomes = Measured.read().frameworks
    assert list(outcomes) == [framework.name for framework in FRAMEWORKS]
    assert [name for name, outcome in outcomes.items() if outcome.unexpected] == []


def test_the_demo_gave_both_verdicts_with_three_pythons_and_three_torches() -> None:
    demos = Measured.read().demos
    assert list(demos) == list(demo.CELLS)
    assert [key for key, each in demos.items() if not each.is_good] == []
    assert len({python for python, _ in demos}) >= 3
    assert len({torch for _, torch in demos}) >= 3


def test_the_package_names_the_pythons_that_were_measured() -> None:
    measured = dict.fromkeys(python for python, _ in Measured.read().cells)
    assert tuple(measured) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_an_example_that_ends_otherwise_than_it_should_is_bold() -> None:
    right = {example.name: example.expect("2.8.0") for example in EXAMPLES}
    good = Cell("3.11", "2.8.0", 9, 0, (), right, 0)
    bad = Cell("3.11", "2.8.0", 9, 0, (), {**right, "fsdp2": 0}, 0)
    assert good.is_good
    assert bad.unexpected == ["fsdp2"]
    pages = [Measured({("3.11", "2.8.0"): cell}).format_page() for cell in (good, bad)]
    assert ["**" in page for page in pages] == [False, True]
