"""This module is the command line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.judge.baseline import NOTHING, Baseline
from ttrace.judge.difference import difference
from ttrace.judge.policy import STRICT, Policy
from ttrace.judge.tolerance import MARGIN
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.rules import Rules
from ttrace.report import difference as difference_report
from ttrace.report import github, junit, listing, machine, suggest, terminal
from ttrace.report import power as power_report
from ttrace.report import sweep as sweep_report
from ttrace.report.document import document
from ttrace.report.facts import SYMBOLS
from ttrace.report.page import About, page
from ttrace.tensors.ids import TensorId
from ttrace.trace.reader import Trace
from ttrace.trace.store import Remote, place
from ttrace.workflow import stored
from ttrace.workflow.engines import choice
from ttrace.workflow.flow import Commands, Flow
from ttrace.workflow.launch import split_command
from ttrace.workflow.matrix import Matrix
from ttrace.workflow.run import Run, Strictness
from ttrace.workflow.space import Space
from ttrace.workflow.stages import Stage
from ttrace.workflow.sweep import Result, Sweep, Swept, most_ranks

app = typer.Typer(
    name="ttrace",
    help="Find silent bugs in distributed training by comparing it with a trusted reference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Out = Annotated[Path, typer.Option("--out", help="The folder to write into.")]
Seed = Annotated[int, typer.Option(help="Another seed gives other parameters and data.")]
Steps = Annotated[int, typer.Option(min=1, help="How many optimizer steps to trace.")]
Margin = Annotated[float, typer.Option(min=1.0, help="How many times the estimated rounding error is tolerated.")]
Only = Annotated[list[str], typer.Option(help="Record only sites that match this glob, e.g. 'layers.0.*'.")]
Skip = Annotated[list[str], typer.Option(help="Do not record sites that match this glob.")]
Recorded = Annotated[
    Literal["full", "sketch"],
    typer.Option(
        "--record", help="Store every tensor, or of large ones 1024 numbers that tell its error to a few percent."
    ),
]
Full = Annotated[list[str], typer.Option(help="With --record sketch: store sites that match this glob in full.")]
Own = Annotated[bool, typer.Option("--own-parameters", help="Keep the script's own initial parameters.")]
OnCompiled = Annotated[
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
Allow = Annotated[
    Path | None, typer.Option("--allow", help="A TOML file of known deviations, each with a reason and a last day.")
]
FailOn = Annotated[
    Literal["unjudged", "findings"],
    typer.Option("--fail-on", help="Exit with 2 where something could not be judged, or only with 1 on findings."),
]
Timeout = Annotated[float, typer.Option(help="Seconds that one command may take.")]
Twins = Annotated[int, typer.Option(min=1, help="How many nudged references estimate rounding.")]
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
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `ttrace run --out` wrote.")]


@app.command()
def run(
    reference: Annotated[str, typer.Option(help="The trusted command, e.g. 'python train.py'.")],
    candidate: Annotated[
        str, typer.Option(help="The command under test, e.g. 'torchrun --nproc-per-node 2 train.py'.")
    ],
    out: Out,
    twins: Twins = 3,
    seed: Seed = 0,
    steps: Steps = 1,
    margin: Margin = MARGIN,
    only: Only = [],  # noqa: B006  # typer reads the default and never changes it
    skip: Skip = [],  # noqa: B006
    record: Recorded = "full",
    full: Full = [],  # noqa: B006
    own_parameters: Own = False,
    isolate: Annotated[
        bool, typer.Option(help="When something is wrong, run again with every module's inputs generated.")
    ] = True,
    repeat: Repeat = True,
    compiled: OnCompiled = "eager",
    microbatch_grads: MicrobatchGrads = False,
    allow: Allow = None,
    fail_on: FailOn = "unjudged",
    fresh: Fresh = False,
    timeout: Timeout = 1800.0,
    baseline: BaselineFile = None,
    update_baseline: UpdateBaseline = False,
    junit_file: Junit = None,
    json_output: Json = False,
) -> None:
    """Run reference, twins and candidate, check them, and say where the first wrong tensor is."""
    settings = Plan(
        out=out,
        seed=seed,
        num_steps=steps,
        only=tuple(only),
        skip=tuple(skip),
        record=record,
        full=tuple(full),
        parameters="own" if own_parameters else "generated",
        compiled=compiled,
        microbatch_grads=microbatch_grads,
    )
    strictness = _strictness(margin, allow)
    console = Console(stderr=json_output)
    folder = Run(out)
    with _progress(console) as progress:
        task = progress.add_task("starting", total=4)

        def begin(name: str) -> None:
            progress.update(task, description=name)
            progress.advance(task)

        def say(line: str) -> None:
            Console(stderr=True).print(line, style="dim", highlight=False, soft_wrap=True)

        commands = Commands(split_command(reference), split_command(candidate), twins, timeout)
        flow = Flow(folder, commands, settings, strictness, begin, say)
        flow.prepare(fresh=fresh)
        flow.trace()
        begin("check")
        judgement = folder.judged(strictness, isolated=False)
        if judgement.findings and repeat:
            progress.update(task, total=5)
            judgement = flow.repeated(judgement)
        if judgement.findings and record == "sketch":
            progress.update(task, total=7)
            judgement = flow.in_full(judgement)
        if judgement.findings and isolate:
            progress.update(task, total=10)
            judgement = flow.isolated(judgement)
    known = _baseline(baseline, judgement, update=update_baseline)
    _tell(folder, judgement, known, json_output=json_output, fail_on=fail_on, junit_file=junit_file)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="A TOML file: axes, and templates of the commands.")],
    out: Out,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="one per core; with accelerators one cell after the other",
            help="How many ranks may run at once; a cell of more runs alone.",
        ),
    ] = None,
    twins: Twins = 3,
    seed: Seed = 0,
    steps: Steps = 1,
    margin: Margin = MARGIN,
    isolate: Annotated[bool, typer.Option(help="Run the smallest failing cells isolated too.")] = True,
    repeat: Repeat = True,
    allow: Allow = None,
    fail_on: FailOn = "unjudged",
    fresh: Fresh = False,
    timeout: Timeout = 1800.0,
    junit_file: Junit = None,
    json_output: Json = False,
) -> None:
    """Run a matrix of layouts and flags against shared references, and say when it fails."""
    console = Console(stderr=True)
    matrix = Matrix.load(file)
    with _progress(console) as progress:
        task = progress.add_task("starting", total=len(matrix.cells))

        def end(result: Result) -> None:
            progress.advance(task)
            if result.judgement is not None:
                _write(result.run, result.judgement)
            mark = SYMBOLS[result.exit]
            console.print(f"{mark} {result.cell.name}", style="dim", highlight=False, soft_wrap=True)

        sweeping = Sweep(
            out,
            matrix,
            Plan(out=out, seed=seed, num_steps=steps),
            num_twins=twins,
            max_ranks=max_ranks or most_ranks(),
            timeout=timeout,
            strictness=_strictness(margin, allow),
            repeats=repeat,
            begin=lambda what: progress.update(task, description=what),
            end=end,
        )
        swept = sweeping.run(fresh=fresh)
        if isolate:
            swept = sweeping.isolated(swept)
    _tell_sweep(out, swept, json_output=json_output, fail_on=fail_on, junit_file=junit_file)


@app.command()
def trace(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to trace.")],
    out: Out,
    reference: Annotated[Path | None, typer.Option(help="The reference's trace; makes this run a candidate.")] = None,
    twin: Annotated[int, typer.Option(min=0, help="With --reference: be the twin of this number.")] = 0,
    store: Annotated[
        str, typer.Option(help="A URL (s3://, gs://) under which traces are kept by name; --out has the log only.")
    ] = "",
    seed: Seed = 0,
    steps: Steps = 1,
    only: Only = [],  # noqa: B006
    skip: Skip = [],  # noqa: B006
    record: Recorded = "full",
    full: Full = [],  # noqa: B006
    own_parameters: Own = False,
    compiled: OnCompiled = "eager",
    microbatch_grads: MicrobatchGrads = False,
    timeout: Timeout = 1800.0,
    json_output: Json = False,
) -> None:
    """Run one command and keep its trace: a reference, or a twin or candidate of one."""
    settings = Plan(
        out=out,
        seed=seed,
        num_steps=steps,
        only=tuple(only),
        skip=tuple(skip),
        record=record,
        full=tuple(full),
        parameters="own" if own_parameters else "generated",
        compiled=compiled,
        microbatch_grads=microbatch_grads,
    )
    settings = settings.model_copy(update={"store": store})
    if reference is not None:
        if not store:
            Space.after(reference, out, 1).check()
        role = "twin" if twin else "candidate"
        settings = settings.model_copy(update={"reference": reference.resolve(), "role": role, "twin": twin})
    Stage(tuple(command), settings).run(timeout=timeout)
    summary = listing.summary(settings.written)
    if json_output:
        typer.echo(json.dumps(summary))
        return
    Console().print(f"{summary['tensors']} tensors of {summary['ranks']} ranks in {settings.written}", soft_wrap=True)
    if not store:
        Console().print(f"next: ttrace show {out}", highlight=False)


@app.command()
def check(
    where: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or the URL of its traces in a store.")],
    engine: Annotated[
        choice.Name,
        typer.Option(help="Where to compare: in threads or processes here, in this job of torchrun, or on Ray."),
    ] = "threads",
    workers: Annotated[int, typer.Option(min=0, help="How many compare; 0: one per core, up to eight.")] = 0,
    margin: Margin = MARGIN,
    allow: Allow = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", help="A rules file that decides the candidate's layouts again.")
    ] = None,
    fail_on: FailOn = "unjudged",
    baseline: BaselineFile = None,
    update_baseline: UpdateBaseline = False,
    junit_file: Junit = None,
    json_output: Json = False,
) -> None:
    """Judge the traces of a run again; nothing is run again."""
    given = None if rules is None else Rules.of(rules)
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    strictness = _strictness(margin, allow)
    console = Console(stderr=json_output, quiet=not choice.speaks(engine))
    folder = place(where)
    if isinstance(folder, Remote) and engine == "torchrun":  # what it kept is told apart by the run's own folder
        raise TTraceError("--engine torchrun needs the traces in a folder: copy them from the store, or use another.")
    run = Run(folder if isinstance(folder, Path) else Path())  # of what is in a store, the report is written here
    with choice.chosen(engine, workers, run, strictness) as chosen, _progress(console, *rate) as progress:
        task = progress.add_task("check", total=None)

        def told(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        if isinstance(folder, Path):
            judgement = run.judged(strictness, rules=given, progress=told, engine=chosen)
        elif given is not None:
            raise TTraceError("--rules needs the traces in a folder: copy them from the store first.")
        else:
            judgement = stored.judged(folder, strictness, progress=told, engine=chosen)
    if choice.speaks(engine):
        known = _baseline(baseline, judgement, update=update_baseline)
        _tell(
            run,
            judgement,
            known,
            json_output=json_output,
            fail_on=fail_on,
            junit_file=junit_file,
            is_stored=isinstance(folder, Remote),
        )


@app.command()
def report(
    folder: RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; RUN/report.html if not given.")
    ] = None,
    margin: Margin = MARGIN,
    allow: Allow = None,
) -> None:
    """Judge the traces of a run again and write the report as one HTML file, to be opened from disk."""
    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("check", total=None)
        judgement = Run(folder).judged(
            _strictness(margin, allow), progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    _console().print(Text(f"report: {_write_page(Run(folder), judgement, out)}"), soft_wrap=True)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN|TRACE", help="A run, or one trace.")],
    tensor: Annotated[str, typer.Argument(metavar="[ID]", help="A tensor id, or a glob over ids.")] = "*",
    json_output: Json = False,
) -> None:
    """List what was recorded, or everything known of one tensor: shards, regions, layouts, who decided them."""
    rows = listing.rows(folder, tensor)
    if json_output:
        typer.echo(json.dumps(rows))
    else:
        listing.show(_console(), folder, rows)


@app.command()
def diff(
    folder: RunFolder,
    tensor: Annotated[str, typer.Argument(metavar="ID", help="A tensor id.")],
    json_output: Json = False,
) -> None:
    """Show how one tensor of the candidate differs from the reference's: by rank, and where most."""
    run = Run(folder).seen
    found = difference(Trace(run.reference), Trace(run.candidate), TensorId.parse(tensor))
    if json_output:
        typer.echo(json.dumps(difference_report.as_json(found)))
    else:
        difference_report.show(_console(), found, str(folder))


@app.command()
def lint(
    folder: RunFolder,
    suggest_rules: Annotated[
        bool, typer.Option("--suggest", help="Print a rules file that would state them, for attach(rules=...).")
    ] = False,
    margin: Margin = MARGIN,
    json_output: Json = False,
) -> None:
    """List the sites whose layout nobody stated, and what it seems to be."""
    judgement = Run(folder).judged(Strictness(margin))
    rows = suggest.unstated(judgement)
    if json_output:
        typer.echo(json.dumps({"sites": rows, "rules": suggest.suggested(judgement)} if suggest_rules else rows))
    elif suggest_rules:
        typer.echo(suggest.suggested(judgement), nl=False)
    else:
        for row in rows:
            layout = f' "{row["layout"]}"' if row["layout"] else ""
            typer.echo(f"{row['site']}: {row['how']}{layout}")
        typer.echo(f"next: ttrace lint {shlex.quote(str(folder))} --suggest" if rows else "every layout is stated")


@app.command()
def selftest(folder: RunFolder, margin: Margin = MARGIN, json_output: Json = False) -> None:
    """Put known faults into a clean run's tensors, in memory, and say which of them the check would reveal."""
    with _progress(Console(stderr=json_output)) as progress:
        task = progress.add_task("selftest", total=None)
        found = Run(folder).selftested(
            margin=margin, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if json_output:
        typer.echo(json.dumps(power_report.as_json(found)))
    else:
        power_report.show(_console(), found)
    raise typer.Exit(int(found.exit))


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Find silent bugs in distributed training by comparing it with a trusted reference."""
    if show_version:
        typer.echo(metadata.version("torch-ttrace"))
        raise typer.Exit


def main() -> None:
    """The `ttrace` command: our own errors are messages and exit code 2, not tracebacks."""
    # A cancelled CI job sends SIGTERM: end like Ctrl-C does, with everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except TTraceError as error:
        if "--json" in sys.argv:
            typer.echo(json.dumps(machine.failure(str(error))))
        Console(stderr=True).print(Text.assemble(("ttrace: ", "bold red"), str(error)), soft_wrap=True)
        raise SystemExit(int(Exit.UNJUDGED)) from None


def _strictness(margin: float, allow: Path | None) -> Strictness:
    return Strictness(margin, STRICT if allow is None else Policy.load(allow))


def _baseline(path: Path | None, judgement: Judgement, *, update: bool) -> Baseline:
    if path is None:
        if update:
            raise TTraceError("--update-baseline needs --baseline FILE, the file to write.")
        return NOTHING
    if update:
        Baseline.of(judgement).save(path)
    return Baseline.load(path)


def _tell(
    run: Run,
    judgement: Judgement,
    known: Baseline,
    *,
    json_output: bool,
    fail_on: str,
    junit_file: Path | None,
    is_stored: bool = False,
) -> None:
    judgement, code = known.told(judgement), known.exit(judgement)
    # What shows single tensors reads them from a folder.
    next_command = "copy the traces to a folder, then: ttrace check RUN" if is_stored else run.next_command(judgement)
    report = _write(run, judgement, next_command, is_stored=is_stored)
    if json_output:
        typer.echo(json.dumps(report))
    else:
        terminal.show(_console(), judgement, next_command, None if is_stored else run.folder / "report.html")
    if junit_file is not None:
        text = terminal.text(judgement, next_command)
        junit.write(junit_file, "ttrace", [junit.Case(str(run.folder), code, text.splitlines()[0], text)])
    if github.is_on():
        for line in github.errors(known.new(judgement), Path.cwd()):
            typer.echo(line, err=True)
        github.add_summary(github.summary(judgement, str(run.folder)))
    raise typer.Exit(_status(code, fail_on))


def _status(code: Exit, fail_on: str) -> int:
    return int(Exit.PASSED if code is Exit.UNJUDGED and fail_on == "findings" else code)


def _tell_sweep(out: Path, swept: Swept, *, json_output: bool, fail_on: str, junit_file: Path | None) -> None:
    table = swept.table
    for result in swept.results:
        if result.judgement is not None and result.cell.values in ([row.values for row in table.failing]):
            _write(result.run, result.judgement)  # the isolated run has added to it
    report = sweep_report.as_json(table, swept.exit)
    (out / "sweep.json").write_text(json.dumps(report, indent=1))
    (out / "sweep.html").write_text(sweep_report.page(table), encoding="utf-8")
    if junit_file is not None:
        junit.write(junit_file, "ttrace sweep", sweep_report.cases(table))
    worst = next(iter([*table.failing, *(row for row in table.rows if row.exit is not Exit.PASSED), *table.rows]))
    if json_output:
        typer.echo(json.dumps(report))
    else:
        next_command = f"ttrace check {shlex.quote(worst.folder)}"
        sweep_report.show(_console(), table, next_command, str(out / "sweep.html"))
    raise typer.Exit(_status(swept.exit, fail_on))


def _write(run: Run, judgement: Judgement, next_command: str = "", *, is_stored: bool = False) -> machine.Report:
    """The report as a page and for programs, beside the traces; of traces in a store there is no page."""
    report = machine.as_json(judgement, next_command or run.next_command(judgement))
    (run.folder / "report.json").write_text(json.dumps(report, indent=1))
    if not is_stored:
        _write_page(run, judgement)
    return report


def _write_page(run: Run, judgement: Judgement, out: Path | None = None) -> Path:
    out = run.folder / "report.html" if out is None else out
    about = About.of(run.folder, run.next_command(judgement), run.seen.folder)
    try:
        out.write_text(document(page(judgement, about)), encoding="utf-8")
    except OSError as error:
        raise TTraceError(f"{out} cannot be written: {error}. Choose another place with `ttrace report -o`.") from None
    return out


def _progress(console: Console, *more: ProgressColumn) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *more)
    # In a pipe even a vanishing bar leaves an empty line.
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _console() -> Console:
    """Standard output; wide where nobody watches, so that ids stay in one piece for grep and copy."""
    is_watched = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_watched else 160)


if __name__ == "__main__":
    main()
