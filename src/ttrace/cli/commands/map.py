"""The command `ttrace map`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli.completion import complete_map
from ttrace.errors import TTraceError


def show_map(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | REFERENCE CANDIDATE]",
            help="A map that TTrace ships with; or two traces.",
            autocompletion=complete_map,
        ),
    ] = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Suggest a map from the names and shapes in a trace of each side.")
    ] = False,
) -> None:
    """List the maps between implementations that TTrace ships with, print one, or suggest one."""
    from ttrace.ports.port_map import PortMap, format_map, list_shipped

    given = names or []
    if suggest:
        typer.echo(_suggest(given), nl=False)
    elif not given:
        typer.echo("\n".join(list_shipped()))
    elif len(given) == 1:
        typer.echo(format_map(PortMap.load(given[0])), nl=False)
    else:
        raise TTraceError("give one name, or --suggest and two traces.")


def _suggest(given: list[str]) -> str:
    from ttrace.ports.port_map import format_map
    from ttrace.ports.suggest import suggest_map
    from ttrace.trace.reader import Trace

    if len(given) != 2:
        raise TTraceError(
            "--suggest needs two traces, as `ttrace trace` writes them: the reference's, the candidate's."
        )
    suggested = suggest_map(*(Trace(Path(folder)) for folder in given))
    num_ignored = len(suggested.ignore.reference), len(suggested.ignore.candidate)
    head = (
        "# Suggested from names and shapes. All parameters correspond. What does not is ignored below: "
        f"{num_ignored[0]} patterns of\n# the reference, {num_ignored[1]} of the candidate. A run with this map shows "
        "whether it is right.\n\n"
    )
    return head + format_map(suggested)
