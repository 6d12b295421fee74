"""The pages for contributors name what exists, and following them ends in a cause that is found, and a field."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, blocks, commands, fits
from ttrace.judge.tolerance import model
from ttrace.judge.verdict import ToleranceRule
from zoo.harness.limits import HANG

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


def test_the_page_about_tolerances_and_the_formula_name_every_term() -> None:
    """`ttrace explain` prints the terms by these names."""
    rules = {rule.value for rule in ToleranceRule}
    rows = re.findall(r"^\| term (.*?) \|", (ROOT / "docs" / "develop" / "accused.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == rules
    assert set(re.findall(r"^    ([a-z]+)  .*\.py: ", model.__doc__ or "", re.M)) == rules


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


def follow(name: str, copy: Path) -> Path:
    """Make a copy of the repository with the changes that a page shows."""
    for folder in ("src", "tests", "zoo", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for block in blocks(ROOT / "docs" / "develop" / name):
        if block.title:
            apply(block, copy / block.title)
    return copy


def apply(block: Block, path: Path) -> None:
    """Write a new file, or change one as a diff shows: with lines before and after, and without line numbers."""
    if block.language != "diff":
        assert not path.exists(), path
        path.write_text(block.text)
        return
    lines = block.text.splitlines(keepends=True)
    old, new = ("".join(line[1:] or line for line in lines if line[0] != left) for left in "+-")
    times = path.read_text().count(old)
    assert times == 1, f"{block.title} has these lines {times} times, not once; change the page's diff:\n{old}"
    path.write_text(path.read_text().replace(old, new))


def run_commands(copy: Path, name: str, part: slice) -> None:
    """Run commands that a page shows, in the changed copy of the repository."""
    path = f"{copy / 'src'}{os.pathsep}{copy}"
    for command, shown in commands(copy / "docs" / "develop" / name)[part]:
        done = subprocess.run(
            [sys.executable, *command.split()[1:]],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert fits(shown, done.stdout.splitlines())


@pytest.fixture(scope="module")
def with_cause(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return follow("cause.md", tmp_path_factory.mktemp("clone"))


@pytest.mark.parametrize("part", [slice(2), pytest.param(slice(2, 3), marks=pytest.mark.slow)], ids=["fast", "zoo"])
def test_the_page_about_causes_ends_in_a_cause_that_is_found(with_cause: Path, part: slice) -> None:
    """Runs the page's commands: first those that write the docs and test the cause, then its entry of the zoo."""
    run_commands(with_cause, "cause.md", part)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_diffs_fit_the_code(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(block for block in blocks(page) if block.language == "diff"):
        copy = tmp_path / str(number)
        shutil.copy(ROOT / block.title, copy)
        apply(block, copy)


@pytest.mark.slow
def test_the_page_about_records_ends_in_a_field_that_is_read_back(tmp_path: Path) -> None:
    run_commands(follow("record.md", tmp_path), "record.md", slice(1))
