"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ttrace.cli.completion import complete_id, complete_map, complete_run

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Out = Annotated[Path, typer.Option("--out", help="The folder to write into.")]
Seed = Annotated[int, typer.Option(help="Another seed gives other parameters and data.")]
Steps = Annotated[int, typer.Option(min=1, help="How many optimizer steps to trace.")]
Margin = Annotated[float, typer.Option(min=1.0, help="How many times the estimated rounding error is tolerated.")]
Only = Annotated[
    list[str],
    typer.Option(help="Record only modules and parameters that match this glob, e.g. 'layers.0.*'; repeatable."),
]
Skip = Annotated[list[str], typer.Option(help="Do not record what matches this glob; repeatable.")]
Record = Annotated[
    Literal["auto", "full", "sketch"],
    typer.Option(
        "--record",
        help="Store every tensor, or of large ones 1024 numbers that tell its error to a few percent, or the latter "
        "as soon as the traces would exceed --budget.",
    ),
]
Budget = Annotated[
    float, typer.Option(min=0.0, help="With --record auto: the GB that the traces of both sides may take.")
]
Full = Annotated[list[str], typer.Option(help="Store what matches this glob in full in any case; repeatable.")]
OwnParameters = Annotated[bool, typer.Option("--own-parameters", help="Keep the script's own initial parameters.")]
Compiled = Annotated[
    Literal["eager", "boundary"],
    typer.Option(
        "--compiled",
        help="What torch.compile made: run it eagerly and see every module, or leave the candidate's as it is and see "
        "only what enters and leaves it.",
    ),
]
MicrobatchGrads = Annotated[
    bool, typer.Option("--microbatch-grads", help="Record what each microbatch adds to the gradients of parameters.")
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="Have torch and cuBLAS choose deterministic kernels where they have them."),
]
ForwardOnly = Annotated[
    bool,
    typer.Option(
        "--forward-only", help="Compare only what modules return, as of generation: all calls are one sequence."
    ),
]
Attach = Annotated[
    Literal["auto", "script"],
    typer.Option(
        "--attach",
        help="Find the training step where the script does not call ttrace.attach, or trace only scripts that do.",
    ),
]
Data = Annotated[
    Literal["generated", "own"],
    typer.Option("--data", help="With automatic attachment: generate batches, or keep and compare the script's own."),
]
Mesh = Annotated[
    str, typer.Option("--mesh", help="The axes of hand-written parallelism, slowest first, e.g. dp=2,tp=4.")
]
RulesFile = Annotated[
    Path | None, typer.Option("--rules", help="A TOML file with the layouts of hand-written parallelism.")
]
PortMapFile = Annotated[
    str,
    typer.Option(
        "--map",
        autocompletion=complete_map,
        help="A TOML file that says what corresponds, if the two sides are different implementations of a model; or "
        "the name of a map that TTrace brings.",
    ),
]
Allow = Annotated[
    Path | None, typer.Option("--allow", help="A TOML file of known deviations, each with a reason and a last day.")
]
FailOn = Annotated[
    Literal["unjudged", "findings"],
    typer.Option("--fail-on", help="Exit with 2 where something could not be judged, or only with 1 on findings."),
]
Timeout = Annotated[float, typer.Option(help="Seconds that one command may take.")]
Twins = Annotated[int, typer.Option(min=1, help="How many perturbed references (twins) estimate the rounding error.")]
Repeat = Annotated[
    bool, typer.Option(help="When something is wrong, run the candidate again and measure its own noise.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Run everything again, also what an earlier run in this folder left.")
]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML into this file too.")]
BaselineFile = Annotated[Path | None, typer.Option("--baseline", help="A file of known findings, which do not fail.")]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Write this run's findings into the file of --baseline.")
]
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The folder that `ttrace run --out` wrote.", autocompletion=complete_run),
]
Tensor = Annotated[str, typer.Argument(metavar="ID", help="A tensor id.", autocompletion=complete_id)]
