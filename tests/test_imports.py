"""Imports point down, and heavy things are imported only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ttrace"

MAY_IMPORT = {
    "errors": set(),
    "tensors": {"errors"},
    "layouts": {"errors", "tensors"},
    "values": {"errors", "tensors"},
    "trace": {"errors", "tensors", "layouts", "values"},
    "reference": {"errors", "tensors", "values"},
    "adapters": {"errors", "tensors", "layouts", "values", "trace", "reference"},
    "capture": {"errors", "tensors", "layouts", "values", "trace", "adapters", "reference"},
    "judge": {"errors", "tensors", "layouts", "values", "trace"},
    "report": {"errors", "tensors", "layouts", "values", "trace", "judge"},
    "attach": {"errors", "layouts", "adapters", "capture"},
    "workflow": {"errors", "tensors", "layouts", "values", "trace", "adapters", "capture", "judge", "report", "attach"},
    "testing": {"errors", "capture", "judge", "report", "workflow"},
}
"""Folder or module, and what it may import; doors (cli, __init__, __main__) may import everything."""

ONLY_IN = {
    "torch.distributed": {"adapters", "capture", "reference", "testing", "workflow"},
    "ray": {"workflow"},
    "rich": {"report", "cli"},
    "typer": {"cli"},
    "transformers": set(),
}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    allowed = MAY_IMPORT.get(part(path))
    if allowed is None:
        return
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("ttrace.")}
    assert ours <= allowed | {part(path)}, f"{path} imports {sorted(ours - allowed - {part(path)})}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_imports_stay_where_they_belong(path: Path) -> None:
    for library, places in ONLY_IN.items():
        uses = any(name == library or name.startswith(f"{library}.") for name in imported(path))
        assert not uses or part(path) in places, f"{path} imports {library}"


def test_every_part_has_its_place() -> None:
    doors = {"cli", "__init__", "__main__"}
    assert {part(path) for path in files()} == set(MAY_IMPORT) | doors


def test_no_folder_is_a_drawer_for_everything() -> None:
    banned = {"utils", "common", "core", "base", "manager", "helpers"}
    assert not [path for path in files() if banned & set(path.with_suffix("").relative_to(SOURCE).parts)]


def test_importing_ttrace_is_cheap() -> None:
    """Under 0.3 s beyond torch, and no report, adapter or framework."""
    code = (
        "import torch, sys, time; start = time.perf_counter(); import ttrace; "
        "print(time.perf_counter() - start); print(*sorted(sys.modules))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(3)
    ]
    assert min(float(run.splitlines()[0]) for run in runs) < 0.3
    modules = set(runs[0].splitlines()[1].split())
    heavy = {"rich", "typer", "pydantic", "ttrace.adapters", "ttrace.report", "ttrace.capture", "ttrace.judge"}
    assert not modules & heavy
