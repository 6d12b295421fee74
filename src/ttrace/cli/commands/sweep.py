"""The command `ttrace sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli.options import Effort, Out, Output, Recording, common


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="A TOML file: axes, and templates of the commands.")],
    out: Out,
    recording: Recording,
    effort: Effort,
    output: Output,
    max_ranks: Annotated[
        int | None,
        common(
            min=1,
            show_default="one per core; with accelerators one cell after the other",
            help="How many ranks may run at once; a larger cell runs alone.",
        ),
    ] = None,
) -> None:
    """Run a matrix of layouts, and report the condition under which it fails.

    The cells of the matrix share their references. Only the smallest failing cells are isolated.
    """
    from ttrace.cli import outcome
    from ttrace.cli.options import make_plan
    from ttrace.report.facts import SYMBOLS
    from ttrace.report.refusal import CleanConsole
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Strictness
    from ttrace.workflow.sweeps.sweep import CellResult, Sweep, check_sweep_folder, count_ranks
    from ttrace.workflow.sweeps.sweep_file import Matrix

    console = CleanConsole(stderr=True)
    matrix = Matrix.load(file)
    check_sweep_folder(out)
    with hold(out):
        with outcome.make_bar(console) as bar:
            task = bar.add_task("starting", total=len(matrix.cells))

            def on_result(result: CellResult) -> None:
                bar.advance(task)
                if result.judgement is not None:
                    outcome.write(result.run, result.judgement)
                mark = SYMBOLS[result.exit]
                console.print(f"{mark} {result.cell.name}", style="dim", highlight=False, soft_wrap=True)

            sweep = Sweep(
                out,
                matrix,
                make_plan(out, recording),
                num_twins=effort.twins,
                max_ranks=max_ranks or count_ranks(),
                timeout=effort.timeout,
                strictness=Strictness.load(effort.margin, effort.allow),
                repeats=effort.repeat,
                isolates=effort.isolate and not recording.forward_only,
                on_stage=lambda name: bar.update(task, description=name),
                on_result=on_result,
            )
            result = sweep.run(fresh=effort.fresh)
        status = outcome.finish_sweep(out, result, output)
    raise typer.Exit(status)
