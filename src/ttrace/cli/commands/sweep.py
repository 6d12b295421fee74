"""The command `ttrace sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrace.cli import options
from ttrace.judge.margin import MARGIN


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="A TOML file: axes, and templates of the commands.")],
    out: options.Out,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="one per core; with accelerators one cell after the other",
            help="How many ranks may run at once; a cell of more runs alone.",
        ),
    ] = None,
    twins: options.Twins = 3,
    seed: options.Seed = 0,
    steps: options.Steps = 1,
    margin: options.Margin = MARGIN,
    isolate: Annotated[bool, typer.Option(help="Run the smallest failing cells isolated too.")] = True,
    repeat: options.Repeat = True,
    allow: options.Allow = None,
    fail_on: options.FailOn = "unjudged",
    fresh: options.Fresh = False,
    timeout: options.Timeout = 1800.0,
    junit_file: options.Junit = None,
    json_output: options.Json = False,
) -> None:
    """Run a matrix of layouts, and say when it fails.

    The cells of the matrix share their references.
    """
    from ttrace.capture.plan import Plan
    from ttrace.cli import outcome, screen
    from ttrace.report.facts import SYMBOLS
    from ttrace.report.terminal.console import CleanConsole
    from ttrace.workflow.folder import hold
    from ttrace.workflow.run import Strictness
    from ttrace.workflow.sweeps.sweep import CellResult, Sweep, check_sweep_folder, count_ranks
    from ttrace.workflow.sweeps.sweep_file import Matrix

    console = CleanConsole(stderr=True)
    matrix = Matrix.load(file)
    check_sweep_folder(out)
    with hold(out):
        with screen.make_bar(console) as bar:
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
                Plan(out=out, seed=seed, num_steps=steps),
                num_twins=twins,
                max_ranks=max_ranks or count_ranks(),
                timeout=timeout,
                strictness=Strictness.load(margin, allow),
                repeats=repeat,
                isolates=isolate,
                on_stage=lambda name: bar.update(task, description=name),
                on_result=on_result,
            )
            result = sweep.run(fresh=fresh)
        outcome.finish_sweep(out, result, json_output=json_output, fail_on=fail_on, junit_file=junit_file)
