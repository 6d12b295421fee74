"""The command `ttrace show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN|TRACE", help="A run, or one trace.")],
    tensor: Annotated[
        str, typer.Argument(metavar="[ID]", help="A tensor id, a glob over ids, or a part of them.")
    ] = "*",
    json_output: options.Json = False,
) -> None:
    """List the recorded tensors, or all about one.

    Of one tensor, print its shards, regions and layouts, and who decided them. Verdicts are those of the last check.
    """
    from ttrace.cli import screen
    from ttrace.errors import NoTraceError
    from ttrace.report.terminal import listing
    from ttrace.workflow.run import MARK, Run

    try:
        rows = listing.list_rows(folder, tensor, Run(folder).read_verdicts())
    except NoTraceError:
        if not folder.is_dir() or any(folder.glob(f"*/{MARK}")):
            Run(folder).check_complete()  # it says what the folder is instead
        raise
    if json_output:
        typer.echo(json.dumps(rows))
    else:
        listing.show(screen.console(), folder, rows)
