"""Bundle of a run for others: everything but the values of tensors and what scripts printed."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from ttrace.errors import TraceError

_SUFFIXES = (".json", ".jsonl", ".html", ".launch")
"""What is packed: reports, plans, manifests, records and collectives. Chunks have the values; logs are left out."""


def write_bundle(folder: Path, target: Path) -> list[str]:
    """Write a zip file of a run, and return the names in it."""
    if not (folder / "report.html").exists():
        raise TraceError(f"{folder} has no report.html: run `ttrace report {folder}` first.")
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in _SUFFIXES and _is_inside(path, folder)]
    names = [str(path.relative_to(folder)) for path in files]
    part = target.with_name(f"{target.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, name in zip(files, names, strict=True):
            packed.write(path, f"{folder.name}/{name}")
    part.replace(target)
    return names


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether this is a file of the run: a link could put any file of ours into what is sent to others."""
    return path.is_file() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
