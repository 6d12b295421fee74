"""The command `ttrace lint`."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.judge.margin import MARGIN


def lint(
    folder: options.RunFolder,
    suggest_rules: Annotated[
        bool, typer.Option("--suggest", help="Print a rules file that states them, for attach(rules=...).")
    ] = False,
    margin: options.Margin = MARGIN,
    json_output: options.Json = False,
) -> None:
    """List layouts that are not stated, and what TTrace attached to by itself."""
    from ttrace.report.machine import suggest
    from ttrace.trace.reader import Trace
    from ttrace.workflow.run import Run, Strictness

    judgement = Run(folder).judge(Strictness(margin))
    rows = suggest.find_unstated(judgement)
    if json_output:
        typer.echo(json.dumps({"sites": rows, "rules": suggest.suggest_rules(judgement)} if suggest_rules else rows))
    elif suggest_rules:
        typer.echo(suggest.suggest_rules(judgement), nl=False)
    else:
        attachment = Trace(Run(folder).candidate).manifest.attachment
        for line in suggest.suggest_lines(attachment) if attachment is not None else ():
            typer.echo(f"attach: {line}")
        for row in rows:
            layout = f' "{row["layout"]}"' if row["layout"] else ""
            typer.echo(f"{row['site']}: {row['how']}{layout}")
        typer.echo(f"next: ttrace lint {shlex.quote(str(folder))} --suggest" if rows else "every layout is stated")
