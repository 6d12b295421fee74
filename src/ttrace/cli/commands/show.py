"""The command `ttrace show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.cli.completion import complete_id, complete_run


def show(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|TRACE", help="A run, or one trace.", autocompletion=complete_run)
    ],
    tensor: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="A tensor id, a glob over ids, or a part of them.", autocompletion=complete_id
        ),
    ] = "*",
    collectives: Annotated[
        bool,
        typer.Option("--collectives", help="List the collectives of the candidate's ranks; ID is then a module."),
    ] = False,
    json_output: options.Json = False,
) -> None:
    """List the recorded tensors, all about one, or the collectives.

    For one tensor, print its shards, regions and layouts, and where the layouts come from. Verdicts are those of the
    last check.
    """
    from ttrace.cli import outcome
    from ttrace.errors import NoTraceError
    from ttrace.report.terminal import listing
    from ttrace.workflow.run import MARK, Run

    if collectives:
        _show_collectives(folder, "" if tensor == "*" else tensor, json_output=json_output)
        return
    try:
        rows = listing.list_rows(folder, tensor, Run(folder).read_verdicts())
    except NoTraceError:
        if not folder.is_dir() or any(folder.glob(f"*/{MARK}")):
            Run(folder).check_complete()  # its error describes what the folder is instead
        raise
    if json_output:
        typer.echo(json.dumps(rows))
    else:
        listing.show(outcome.console(), folder, rows)


def _show_collectives(folder: Path, module: str, *, json_output: bool) -> None:
    """List what the ranks of a run's candidate, or of one trace, communicated."""
    from ttrace.cli import outcome
    from ttrace.report.collectives import check_found, list_collectives
    from ttrace.report.terminal import listing
    from ttrace.trace.reader import Trace

    candidate = folder / "candidate"
    rows = list_collectives(Trace(candidate if candidate.is_dir() else folder), module)
    if json_output:
        typer.echo(json.dumps(rows))
        return
    check_found(rows, folder, module)
    listing.print_table(outcome.console(), list(rows[0]), rows, folds=False)
