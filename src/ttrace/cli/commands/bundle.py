"""The command `ttrace bundle`."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.errors import TraceError


def bundle(
    folder: options.RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; RUN.zip beside the run if not given.")
    ] = None,
) -> None:
    """Pack a run for others: its report, what was recorded and how it was judged, without the values of tensors.

    The output of the scripts is left out, too. Commands, paths and names are in it.
    """
    from rich.text import Text

    from ttrace.cli import outcome
    from ttrace.report.facts import format_bytes
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run

    Run(folder).check_complete()
    target = out or folder.with_name(f"{folder.name}.zip")
    with hold(folder):
        names = write_bundle(folder, target)
    size = format_bytes(target.stat().st_size)
    outcome.console().print(Text(f"{target}: {len(names)} files, {size}, no values of tensors"), soft_wrap=True)


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
