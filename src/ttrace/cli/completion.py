"""Values that a shell completes: runs, tensor ids and maps.

A shell asks whenever Tab is pressed, so nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import typer

_MARK, _REPORT = "run.json", "report.json"
_DEEPEST = 3
"""How many levels of folders below the current one are searched for runs."""
_MOST_BYTES = 10_000_000
"""The ids of a larger report are not completed: reading it takes too long."""
_MAPS = Path(__file__).parents[1] / "ports" / "maps"


def complete_run(incomplete: str) -> list[str]:
    """List the folders of runs; without any, a shell completes the names of files."""
    start = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    return sorted(run for run in _list_runs(start) if run.startswith(incomplete))


def complete_id(context: typer.Context, incomplete: str) -> list[str]:
    """List the tensor ids in the report of the run that the command line names, wrong ones first."""
    try:
        report = Path(str(context.params["folder"]), _REPORT)
        if report.stat().st_size > _MOST_BYTES:
            return []
        tensors = json.loads(report.read_bytes())["tensors"]
        rows = sorted((row["verdict"] == "PASS", row["id"]) for row in tensors)
    except (OSError, ValueError, TypeError, LookupError):  # no folder yet, or no report
        return []
    return [name for _, name in rows if name.startswith(incomplete)]


def complete_map(incomplete: str) -> list[str]:
    """List the maps that TTrace ships with."""
    return sorted(path.stem for path in _MAPS.glob("*.toml") if path.stem.startswith(incomplete))


def _list_runs(start: Path) -> Iterator[str]:
    for depth in range(_DEEPEST + 1):
        for mark in start.glob(f"{'*/' * depth}{_MARK}"):
            if mark.parent != Path():
                yield str(mark.parent)
