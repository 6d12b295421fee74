"""Options of the commands: each stands here once, alone or in a group that several commands take as one value.

A command takes a group as one parameter, and `expand_groups` makes an option of every field. So a new recording option
is a field of `Recording` and one of `Plan`; `run`, `trace`, `sweep` and docs/reference/commands.md follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from ttrace.cli.completion import complete_id, complete_map, complete_run
from ttrace.judge.margin import MARGIN

if TYPE_CHECKING:
    from ttrace.capture.plan import Plan

COMMON, FOLLOW_UP, RECORDING = "Common", "When something is wrong", "Recording"
PARALLELISM, OUTPUT = "Parallelism", "Output"
PANELS = (COMMON, FOLLOW_UP, RECORDING, PARALLELISM, OUTPUT)
"""The panels of a command's help, in this order."""
_ARGUMENTS = "Arguments"
common, follow_up, recording, parallelism, output = (partial(typer.Option, rich_help_panel=panel) for panel in PANELS)
"""typer.Option for an option of each panel."""

Out = Annotated[Path, common("--out", metavar="FOLDER", help="The folder to write to.")]
Steps = Annotated[int, common(min=1, help="The number of optimizer steps to trace.")]
Twins = Annotated[
    int, common(min=1, help="The number of twins: slightly perturbed references, which measure the rounding error.")
]
Margin = Annotated[float, common(min=1.0, help="Tolerate this many times the estimated rounding error.")]
Allow = Annotated[
    Path | None,
    common("--allow", metavar="FILE", help="A TOML file of known deviations, each with a reason and an expiry date."),
]
Timeout = Annotated[float, common(help="The seconds that one command may take.")]
RulesFile = Annotated[
    Path | None,
    parallelism("--rules", metavar="FILE", help="A TOML file with the layouts of hand-written parallelism."),
]
Json = Annotated[bool, output("--json", help="Print JSON for programs instead of text for people.")]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder that `ttrace run --out` wrote.", autocompletion=complete_run)
]
Tensor = Annotated[str, typer.Argument(metavar="ID", help="A tensor id.", autocompletion=complete_id)]


@dataclass(frozen=True)
class Recording:
    """What to record and how; `make_plan` makes a plan of it."""

    steps: Steps = 1
    seed: Annotated[int, recording(help="The seed of generated parameters and batches.")] = 0
    only: Annotated[
        list[str],
        recording(
            metavar="GLOB",
            help="Record only modules and parameters that match this glob, e.g. 'layers.0.*'; repeatable.",
        ),
    ] = field(default_factory=list)
    skip: Annotated[list[str], recording(metavar="GLOB", help="Do not record what matches this glob; repeatable.")] = (
        field(default_factory=list)
    )
    record: Annotated[
        Literal["auto", "full", "sketch"],
        recording(
            help="full: store every value. sketch: store 1024-number sketches of large tensors (errors known to a few "
            "percent). auto: full until --budget is reached, then sketches."
        ),
    ] = "auto"
    budget: Annotated[
        float, recording(min=0.0, help="With --record auto: the gigabytes that the traces of both sides may take.")
    ] = 2.0
    full: Annotated[
        list[str], recording(metavar="GLOB", help="Always store what matches this glob in full; repeatable.")
    ] = field(default_factory=list)
    own_parameters: Annotated[bool, recording("--own-parameters", help="Keep the script's own initial parameters.")] = (
        False
    )
    data: Annotated[
        Literal["generated", "own"],
        recording(help="For scripts without ttrace.attach: generate batches, or keep and compare the script's own."),
    ] = "generated"
    attach: Annotated[
        Literal["auto", "script"],
        recording(help="auto: also trace scripts that do not call ttrace.attach. script: trace only scripts that do."),
    ] = "auto"
    microbatch_grads: Annotated[
        bool, recording("--microbatch-grads", help="Record what each microbatch adds to the parameter gradients.")
    ] = False
    forward_only: Annotated[
        bool,
        recording(
            "--forward-only",
            help="Compare forward outputs only, e.g. for generation; all calls of a module form one sequence.",
        ),
    ] = False
    compiled: Annotated[
        Literal["eager", "boundary"],
        recording(
            help="eager: run compiled modules eagerly and record everything. boundary: keep the candidate compiled and "
            "record only its inputs and outputs."
        ),
    ] = "eager"
    deterministic: Annotated[
        bool, recording("--deterministic", help="Use deterministic kernels of torch and cuBLAS where they exist.")
    ] = False
    mesh: Annotated[
        str, parallelism(metavar="AXES", help="The axes of hand-written parallelism, slowest first, e.g. dp=2,tp=4.")
    ] = ""
    rules: RulesFile = None
    port: Annotated[
        str,
        parallelism(
            "--map",
            metavar="MAP",
            autocompletion=complete_map,
            help="How two different implementations of a model correspond: a TOML file, or the name of a map that "
            "TTrace ships with.",
        ),
    ] = ""


@dataclass(frozen=True)
class Effort:
    """How a run or a sweep measures, judges and follows up findings."""

    twins: Twins = 3
    margin: Margin = MARGIN
    allow: Allow = None
    timeout: Timeout = 1800.0
    fresh: Annotated[bool, common("--fresh", help="Run everything again instead of keeping earlier traces.")] = False
    repeat: Annotated[bool, follow_up(help="Run the candidate again to measure its own run-to-run noise.")] = True
    isolate: Annotated[bool, follow_up(help="Run both sides again with generated inputs for every module.")] = True


@dataclass(frozen=True)
class KnownFindings:
    """Findings that are known already."""

    baseline: Annotated[
        Path | None, output(metavar="FILE", help="A file of known findings, which do not fail the check.")
    ] = None
    update_baseline: Annotated[
        bool, output("--update-baseline", help="Write this run's findings to the --baseline file.")
    ] = False


@dataclass(frozen=True)
class Output:
    """How a result is reported."""

    fail_on: Annotated[
        Literal["unjudged", "findings"],
        output(
            help="findings: exit with 1 for findings, and with 0 otherwise. unjudged: also exit with 2 if something "
            "could not be judged."
        ),
    ] = "unjudged"
    junit: Annotated[Path | None, output(metavar="FILE", help="Also write the result as JUnit XML to this file.")] = (
        None
    )
    json: Json = False


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of its parameters that are groups, and pass it the whole groups."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += list_options(hints[name]) if name in groups else [parameter.replace(annotation=hints[name])]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    # typer reads the signature and the annotations.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions may have one
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def list_options(group: type) -> list[inspect.Parameter]:
    """Return the fields of a group as parameters, as typer reads them."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default if each.default_factory is MISSING else each.default_factory(),
            annotation=hints[each.name],
        )
        for each in fields(group)
    ]


class PanelCommand(TyperCommand):
    """A command whose help shows its options in panels.

    Plain text, as without panels: typer's own panels are drawn by rich, which takes longer to import than all else,
    and its frames are in the way of grep.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:  # of click, or of the copy of it that typer ships with
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in (_ARGUMENTS, *PANELS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = _ARGUMENTS if param.param_type_name == "argument" else COMMON
                panels[getattr(param, "rich_help_panel", None) or default].append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


def make_plan(out: Path, options: Recording, *, store: str = "") -> Plan:
    """Make the plan of these options. Most have the name of their field in the plan; the others are converted here."""
    from ttrace.capture.plan import Plan
    from ttrace.layouts.mesh import Mesh
    from ttrace.layouts.rules import read_table
    from ttrace.ports.port_map import PortMap

    values = {each.name: getattr(options, each.name) for each in fields(options)}
    values |= {
        "num_steps": values.pop("steps"),
        "budget": max(1, round(options.budget * 1e9)),
        "parameters": "own" if values.pop("own_parameters") else "generated",
        "mesh": str(Mesh.parse(options.mesh.replace(",", " "))) if options.mesh else "",
        "rules": {} if options.rules is None else read_table(options.rules),
        "port": PortMap.load(options.port) if options.port else None,
    }
    return Plan(out=out, store=store, **values)
