"""The tests mirror the tree, and what they share stands in tests/support."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS, SUPPORT = ROOT / "tests", ROOT / "tests" / "support"
OF_THE_WHOLE = {"bench", "device", "faults", "fuzz", "laws", "matrix", "megatron", "quality", "support", "zoo"}
"""Folders of tests that belong to no room of the package."""


def imported_modules(path: Path) -> set[str]:
    """Return every module that this one may import, `from a import b` as both `a` and `a.b`."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def is_test_module(module: str) -> bool:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path.name.startswith("test_") and path.exists()


def test_no_module_imports_a_test_module() -> None:
    modules = [path for folder in ("bench", "fuzz", "tests", "zoo") for path in (ROOT / folder).rglob("*.py")]
    wrong = {str(path.relative_to(ROOT)): found for path in modules if (found := _test_modules(path))}
    assert not wrong, "what tests share belongs into tests/support; what they share with the zoo, into zoo/harness"


def _test_modules(path: Path) -> list[str]:
    return sorted(filter(is_test_module, imported_modules(path)))


def test_only_tests_import_what_tests_share() -> None:
    modules = [path for folder in ("bench", "fuzz", "src", "zoo") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in modules if any(name.startswith("tests") for name in imported_modules(path))]


def test_helpers_stand_in_support() -> None:
    modules = [path for path in TESTS.rglob("*.py") if path.stem not in ("__init__", "conftest")]
    modules = [path for path in modules if not path.is_relative_to(TESTS / "device" / "plugin")]  # a package of its own
    misplaced = [path for path in modules if path.name.startswith("test_") == path.is_relative_to(SUPPORT)]
    assert not misplaced, "tests are in the folder of what they test, what they share is in tests/support"


def test_folders_of_tests_are_rooms_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    rooms = {folder for folder in folders if folder.parts[0] not in OF_THE_WHOLE}
    assert not {room for room in rooms if not (ROOT / "src" / "ttrace" / room).is_dir()}
