"""The command `ttrace compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options

_KINDS = "a safetensors file, a file of torch.save, or a folder of such files or of torch.distributed.checkpoint"


def compare(
    reference: Annotated[Path, typer.Argument(help=f"The trusted checkpoint: {_KINDS}.")],
    candidate: Annotated[Path, typer.Argument(help="The checkpoint in question, in any of these formats.")],
    json_output: options.Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, without a model: exit code 1 if they differ."""
    from ttrace.checkpoints.checkpoint import open_checkpoint
    from ttrace.checkpoints.comparison import compare_checkpoints
    from ttrace.cli import outcome
    from ttrace.judge.verdict import Exit
    from ttrace.report import checkpoints

    comparison = compare_checkpoints(open_checkpoint(reference), open_checkpoint(candidate))
    if json_output:
        typer.echo(json.dumps(checkpoints.as_json(comparison)))
    else:
        checkpoints.show(outcome.console(), comparison)
    raise typer.Exit(Exit.PASSED if comparison.is_same else Exit.FOUND)
