"""The command `ttrace bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options


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

    from ttrace.cli import screen
    from ttrace.report.machine.bundle import write_bundle
    from ttrace.report.numbers import format_bytes
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run

    Run(folder).check_complete()
    target = out or folder.with_name(f"{folder.name}.zip")
    with hold(folder):
        names = write_bundle(folder, target)
    size = format_bytes(target.stat().st_size)
    screen.console().print(Text(f"{target}: {len(names)} files, {size}, no values of tensors"), soft_wrap=True)
