"""The command `ttrace archive`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ttrace.cli import options


def archive(
    folder: options.RunFolder,
    restore: Annotated[bool, typer.Option("--restore", help="Bring the traces back as they were.")] = False,
    json_output: options.Json = False,
) -> None:
    """Pack a run into less space.

    Candidate and twins are kept as differences to the reference. Every other command reads them as before, only slower.
    """
    from rich.text import Text

    from ttrace.cli import screen
    from ttrace.report.numbers import format_bytes
    from ttrace.report.terminal.console import CleanConsole
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Run

    run = Run(folder)
    run.check_complete()
    with hold(folder):
        before = run.num_bytes()
        with screen.show_progress("restore" if restore else "archive", CleanConsole(stderr=json_output)) as progress:
            (run.restore if restore else run.archive)(progress)
        after = run.num_bytes()
        if json_output:
            typer.echo(json.dumps({"folder": str(folder), "bytes_before": before, "bytes_after": after}))
            return
        state = "as they were" if restore else "kept as differences to the reference"
        sizes = f"{format_bytes(after)} in all, before {format_bytes(before)}"
        screen.console().print(Text(f"{folder}: candidate and twins are {state}: {sizes}"), soft_wrap=True)
