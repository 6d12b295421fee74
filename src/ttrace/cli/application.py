"""The command line's application: every command by name.

Nothing here imports torch, nor do the modules of the commands before one of them runs: `ttrace --help` is quick, and
works where torch cannot be imported.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Annotated

import typer

from ttrace.cli.commands.bisect_exit import bisect_exit
from ttrace.cli.commands.bundle import bundle
from ttrace.cli.commands.check import check
from ttrace.cli.commands.compare import compare
from ttrace.cli.commands.demo import demo
from ttrace.cli.commands.diff import diff
from ttrace.cli.commands.doctor import doctor
from ttrace.cli.commands.explain import explain
from ttrace.cli.commands.lint import lint
from ttrace.cli.commands.map import show_map
from ttrace.cli.commands.report import report
from ttrace.cli.commands.results.archive import archive
from ttrace.cli.commands.run import run
from ttrace.cli.commands.selftest import selftest
from ttrace.cli.commands.show import show
from ttrace.cli.commands.sweep import sweep
from ttrace.cli.commands.trace import trace
from ttrace.untrusted import LIMITS_VARIABLE

app = typer.Typer(
    name="ttrace",
    help="Find silent bugs in distributed training by comparing it with a trusted reference.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    demo,
    run,
    sweep,
    trace,
    check,
    report,
    show,
    diff,
    explain,
    compare,
    archive,
    bundle,
    lint,
    selftest,
    doctor,
):
    app.command()(command)
app.command("map")(show_map)
app.command("bisect-exit", context_settings={"ignore_unknown_options": True})(bisect_exit)


@app.callback(invoke_without_command=True)
def apply_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    limits: Annotated[
        int, typer.Option(min=1, help="How many times larger than usual files may be that are read from traces.")
    ] = 1,
) -> None:
    """Find silent bugs in distributed training by comparing it with a trusted reference."""
    if limits != 1:
        os.environ[LIMITS_VARIABLE] = str(limits)  # for the processes that work for this one, too
    if version:
        typer.echo(metadata.version("torch-ttrace"))
        raise typer.Exit
