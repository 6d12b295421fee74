"""The command `ttrace bisect-exit`."""

from __future__ import annotations

import subprocess
from typing import Annotated

import typer

_SKIP = 125
"""The exit code by which `git bisect run` leaves a commit out."""


def bisect_exit(
    command: Annotated[list[str], typer.Argument(help="The command, such as `ttrace run ...`, and its arguments.")],
) -> None:
    """Run a command for `git bisect run`: exit with 0 and 1 as it does, and with 125 otherwise.

    A commit that could not be judged (2), or at which the script does not even run, is then left out.
    """
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        typer.echo(f"ttrace: {error}", err=True)
        code = _SKIP
    raise typer.Exit(code if code in (0, 1) else _SKIP)
