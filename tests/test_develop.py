"""The pages for contributors name files, functions and commands that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks

PAGES = sorted((ROOT / "docs" / "develop").glob("*.md"))
FOLDERS = (ROOT, ROOT / "src" / "ttrace")
_NAMED = re.compile(r"`([\w./-]+\.(?:py|md|json|toml)|[\w./-]+/[\w./-]+)(?:::([\w.]+))?`")


def created(page: Path) -> set[str]:
    """The files that a page tells the reader to write."""
    return {block.title for block in blocks(page) if not (ROOT / block.title).is_file()}


def find(name: str) -> Path | None:
    """A file or folder as pages name it: from the root of the repository, or from `src/ttrace`."""
    return next((folder / name for folder in FOLDERS if (folder / name).exists()), None)


def defines(path: Path, dotted: str) -> bool:
    """Whether a file defines a function, a class, a class's member or a variable."""
    body = ast.parse(path.read_text()).body
    for part in dotted.split("."):
        matching = [node for node in body if part in _names_of(node)]
        if not matching:
            return False
        body = getattr(matching[0], "body", [])
    return True


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_functions_exist(page: Path) -> None:
    for name, function in _NAMED.findall(page.read_text()):
        if name.startswith(("runs/", "0/")) or name in created(page) or f"src/ttrace/{name}" in created(page):
            continue
        path = find(name)
        assert path is not None, f"{page.name} names {name}"
        assert not function or defines(path, function), f"{page.name} names {name}::{function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_that_are_run_or_fail_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\btests/[\w/]+\.py", text)) - created(page):
        assert (ROOT / name).is_file(), f"{page.name} runs {name}"
    every = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in every, f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_imports_what_exists(page: Path) -> None:
    """Fragments are indented as in the file they belong to; whole files are parsed, and their imports looked up."""
    for block in blocks(page):
        if block.language != "python" or not block.title or block.title not in created(page):
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ttrace"):
                base = (node.module or "").replace(".", "/")
                path = find(f"src/{base}.py") or find(f"src/{base}/__init__.py")
                assert path is not None, f"{page.name}: {node.module}"
                text = path.read_text()
                missing = [a.name for a in node.names if not re.search(rf"\b{a.name}\b", text)]
                assert not missing, f"{page.name}: {node.module} has no {missing}"
