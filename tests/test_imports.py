"""Imports point down, and heavy things are imported only where they belong."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from zoo.harness.limits import HANG

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ttrace"

BASE = {"errors", "untrusted"}
"""What everything may import."""

MAY_IMPORT = {
    "errors": set(),
    "untrusted": {"errors"},
    "notebook": {"untrusted"},
    "patches": set(),
    "compat": {"errors"},
    "layouts": {*BASE},
    "values": {*BASE, "layouts"},
    "trace": {*BASE, "layouts", "values"},
    "ports": {*BASE, "layouts", "trace"},
    "large_references": {*BASE, "patches", "compat", "layouts", "values"},
    "adapters": {*BASE, "patches", "compat", "layouts", "values", "trace", "large_references"},
    "capture": {*BASE, "patches", "compat", "layouts", "values", "trace", "adapters", "large_references", "ports"},
    "judge": {*BASE, "notebook", "layouts", "values", "trace"},
    "checkpoints": {*BASE, "layouts", "trace", "judge"},
    "report": {*BASE, "compat", "layouts", "values", "trace", "judge", "checkpoints"},
    "attach": {*BASE, "layouts", "adapters", "capture"},
    "monitor": {*BASE, "notebook", "layouts", "adapters", "capture"},
    "automatic": {*BASE, "patches", "compat", "trace", "adapters", "capture", "attach"},
    "callbacks": {"layouts", "capture", "monitor", "attach", "automatic"},
    "workflow": {
        *BASE,
        "compat",
        "layouts",
        "values",
        "trace",
        "adapters",
        "capture",
        "judge",
        "report",
        "attach",
        "automatic",
    },
    "testing": {*BASE, "compat", "capture", "judge", "report", "workflow"},
}
"""Folder or module, and what it may import; doors (cli, __init__, __main__) may import everything."""

FLOORS = {
    "judge": (
        {"margin", "reason", "engine", "compatibility", "communication"},
        {"verdict"},
        {"tensors"},
        {"tolerance"},
        {"compare"},
        {"causes"},
        {"findings", "notes", "depth", "policy", "reach"},
        {"check", "selftest", "explanation"},
    ),
    "capture": (
        {"plan", "environment", "process"},
        {"resolve"},
        {"observe"},
        {"probes"},
        {"state"},
        {"parts"},
        {"session"},
        {"start"},
    ),
    "layouts": (
        {"ids", "mesh", "ranges"},
        {"region"},
        {"holds", "splits"},
        {"layout"},
        {"placement"},
        {"rules", "infer"},
    ),
    "trace": (
        {"buffered_file", "tensor_bytes"},
        {"seal"},
        {"format"},
        {"agreement", "lines", "collectives"},
        {"store"},
        {"rank"},
        {"twin_stats"},
        {"writer"},
        {"reader", "background_writer"},
        {"relayout"},
    ),
    "automatic": (
        {"variables", "imports"},
        {"frameworks", "data_sources"},
        {"first_step"},
        {"traced_steps"},
        {"watch"},
        {"installation"},
        {"hook"},
    ),
    "report": (
        {"health", "refusal"},
        {"facts"},
        {"collectives", "checkpoints"},
        {"terminal"},
        {"page", "machine"},
        {"sweep"},
    ),
    "workflow": (
        {"supervisor", "folder"},
        {"launch"},
        {"stages", "doctor"},
        {"run"},
        {"engines"},
        {"flow"},
        {"investigation"},
        {"sweeps"},
    ),
    "adapters": (
        {"wrappers"},
        {"adapter"},
        {"native", "megatron"},
        {"deepspeed", "torchtitan"},
        {"transformers"},
        {"registry"},
    ),
}
"""The rooms and files of a folder, from the ground up; each imports only itself and what lies below."""

ONLY_IN = {
    "torch.distributed": {
        "compat",
        "adapters",
        "checkpoints",
        "automatic",
        "callbacks",
        "capture",
        "monitor",
        "large_references",
        "testing",
        "workflow",
    },
    "rich": {"report", "cli"},
    "typer": {"cli"},
    "transformers": {"callbacks"},
    "lightning": {"callbacks"},
    "triton": {"values"},
}


SCRIPTS = SOURCE / "cli" / "scripts"
"""Scripts as users write them, which no module imports."""


def files(folder: Path = SOURCE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.is_relative_to(SCRIPTS))


def module(path: Path, folder: Path = SOURCE) -> tuple[str, ...]:
    """The name of a module below the package `folder`; a package is its folder."""
    parts = path.relative_to(folder).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def targets(path: Path, folder: Path = SOURCE) -> Iterator[tuple[str, ...]]:
    """The modules of a package that a file imports; `from package import name` counts as the module `package.name`."""
    modules = find_modules(folder)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if tuple(name.split(".")[1:]) in modules else node.module or "" for name in whole]
        else:
            continue
        yield from (tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == folder.name)


@functools.cache
def find_modules(folder: Path) -> set[tuple[str, ...]]:
    return {module(path, folder) for path in files(folder)}


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


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_point_down_within_a_folder(folder: str) -> None:
    floor_of = {name: number for number, names in enumerate(FLOORS[folder]) for name in names}
    for path in sorted((SOURCE / folder).rglob("*.py")):
        own = path.relative_to(SOURCE / folder).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in floor_of, f"add {own} to FLOORS[{folder!r}]"
        for target in targets(path):
            if target[0] == folder and len(target) > 1 and target[1] != own:
                assert floor_of[target[1]] < floor_of[own], f"{path} imports {'.'.join(target)}"


@pytest.mark.parametrize("folder", [SOURCE, ROOT / "zoo", ROOT / "bench"], ids=lambda folder: folder.name)
def test_no_imports_go_in_a_circle(folder: Path) -> None:
    """Counts imports inside functions and under TYPE_CHECKING too."""
    modules = find_modules(folder)
    graph = {module(path, folder): modules.intersection(targets(path, folder)) for path in files(folder)}
    order = TopologicalSorter({name: {t for t in needed if t != name} for name, needed in graph.items()})
    order.prepare()  # raises CycleError, which names the circle


def test_every_part_has_its_place() -> None:
    doors = {"cli", "__init__", "__main__"}
    assert {part(path) for path in files()} == set(MAY_IMPORT) | doors


def test_no_folder_is_a_drawer_for_everything() -> None:
    banned = {"utils", "common", "core", "base", "manager", "helpers"}
    assert not [path for path in files() if banned & set(path.with_suffix("").relative_to(SOURCE).parts)]


HEAVY = ("check", "Disagreement", "Monitor")
"""Public names that a script has no use for, so they may import more."""


def test_importing_ttrace_is_cheap() -> None:
    """At most a fifth of the CPU time of torch's own import, and no report, adapter or framework."""
    code = (
        "import sys, time; import torch; before = time.process_time(); import ttrace; "
        f"[getattr(ttrace, name) for name in ttrace.__all__ if name not in {HEAVY}]; "
        "print(time.process_time() / before - 1); print(*sorted(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG).stdout.splitlines()
    assert float(done[0]) < 0.2
    modules = set(done[1].split())
    heavy = {"rich", "typer", "pydantic", "ttrace.adapters", "ttrace.report", "ttrace.capture", "ttrace.judge"}
    assert not modules & heavy


def test_the_supervisor_needs_the_standard_library_only() -> None:
    """It is started by `python -I -S`, which finds no package that is installed."""
    path = SOURCE / "workflow" / "supervisor.py"
    assert {name.split(".")[0] for name in imported(path)} <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize("words", [["--help"], ["check", "--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_needs_no_torch(words: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {words}; from ttrace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_class_name_has_one_meaning() -> None:
    """A name that several files define would mean something else in each; private ones are known in one file only."""
    homes: dict[str, list[str]] = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    del homes["TTraceCallback"], homes["WatchCallback"]  # one for each framework, which its users import by this name
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
