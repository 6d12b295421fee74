"""This module has the commands. What they do is done elsewhere: they read options, call it, and tell how it ended."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    DownloadColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ttrace.capture.plan import Plan
from ttrace.cli import options, outcome, screen
from ttrace.errors import TTraceError
from ttrace.judge.margin import MARGIN
from ttrace.judge.tensors.difference import difference
from ttrace.layouts.rules import Rules
from ttrace.report.facts import SYMBOLS
from ttrace.report.machine import suggest
from ttrace.report.terminal import difference as difference_report
from ttrace.report.terminal import listing
from ttrace.report.terminal import selftest as power_report
from ttrace.trace.reader import Trace
from ttrace.trace.storage.store import Remote, place
from ttrace.workflow import stored
from ttrace.workflow.disk_space import Space, sized
from ttrace.workflow.engines import select
from ttrace.workflow.flow import Commands, Flow
from ttrace.workflow.launch import split_command
from ttrace.workflow.lock import hold
from ttrace.workflow.run import Run, Strictness
from ttrace.workflow.stages import Stage
from ttrace.workflow.sweeps.sweep import Result, Sweep, check_sweep_folder, most_ranks
from ttrace.workflow.sweeps.sweep_file import Matrix

app = typer.Typer(
    name="ttrace",
    help="Find silent bugs in distributed training by comparing it with a trusted reference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def run(
    reference: Annotated[str, typer.Option(help="The trusted command, e.g. 'python train.py'.")],
    candidate: Annotated[
        str, typer.Option(help="The command under test, e.g. 'torchrun --nproc-per-node 2 train.py'.")
    ],
    out: options.Out,
    twins: options.Twins = 3,
    seed: options.Seed = 0,
    steps: options.Steps = 1,
    margin: options.Margin = MARGIN,
    only: options.Only = [],  # noqa: B006  # typer reads the default and never changes it
    skip: options.Skip = [],  # noqa: B006
    record: options.Recorded = "full",
    full: options.Full = [],  # noqa: B006
    own_parameters: options.Own = False,
    isolate: Annotated[
        bool, typer.Option(help="When something is wrong, run again with every module's inputs generated.")
    ] = True,
    repeat: options.Repeat = True,
    compiled: options.OnCompiled = "eager",
    microbatch_grads: options.MicrobatchGrads = False,
    allow: options.Allow = None,
    fail_on: options.FailOn = "unjudged",
    fresh: options.Fresh = False,
    timeout: options.Timeout = 1800.0,
    baseline: options.BaselineFile = None,
    update_baseline: options.UpdateBaseline = False,
    junit_file: options.Junit = None,
    json_output: options.Json = False,
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
    strictness = options.strictness(margin, allow)
    console = Console(stderr=json_output)
    folder = Run(out)
    commands = Commands(split_command(reference), split_command(candidate), twins, timeout)
    Flow(folder, commands, settings).check_folder()
    with hold(out):
        with screen.bar(console) as progress:
            task = progress.add_task("starting", total=4)

            def begin(name: str) -> None:
                progress.update(task, description=name)
                progress.advance(task)

            def say(line: str) -> None:
                Console(stderr=True).print(line, style="dim", highlight=False, soft_wrap=True)

            flow = Flow(folder, commands, settings, strictness, begin, say)
            flow.prepare(fresh=fresh)
            with _interruptible(say):
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
        known = outcome.baseline(baseline, judgement, update=update_baseline)
        outcome.tell(folder, judgement, known, json_output=json_output, fail_on=fail_on, junit_file=junit_file)


@app.command()
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
    """Run a matrix of layouts and flags against shared references, and say when it fails."""
    console = Console(stderr=True)
    matrix = Matrix.load(file)
    check_sweep_folder(out)
    with hold(out):
        with screen.bar(console) as progress:
            task = progress.add_task("starting", total=len(matrix.cells))

            def end(result: Result) -> None:
                progress.advance(task)
                if result.judgement is not None:
                    outcome.write(result.run, result.judgement)
                mark = SYMBOLS[result.exit]
                console.print(f"{mark} {result.cell.name}", style="dim", highlight=False, soft_wrap=True)

            sweeping = Sweep(
                out,
                matrix,
                Plan(out=out, seed=seed, num_steps=steps),
                num_twins=twins,
                max_ranks=max_ranks or most_ranks(),
                timeout=timeout,
                strictness=options.strictness(margin, allow),
                repeats=repeat,
                begin=lambda what: progress.update(task, description=what),
                end=end,
            )
            swept = sweeping.run(fresh=fresh)
            if isolate:
                swept = sweeping.isolated(swept)
        outcome.tell_sweep(out, swept, json_output=json_output, fail_on=fail_on, junit_file=junit_file)


@app.command()
def trace(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to trace.")],
    out: options.Out,
    reference: Annotated[Path | None, typer.Option(help="The reference's trace; makes this run a candidate.")] = None,
    twin: Annotated[int, typer.Option(min=0, help="With --reference: be the twin of this number.")] = 0,
    store: Annotated[
        str, typer.Option(help="A URL (s3://, gs://) under which traces are kept by name; --out has the log only.")
    ] = "",
    seed: options.Seed = 0,
    steps: options.Steps = 1,
    only: options.Only = [],  # noqa: B006
    skip: options.Skip = [],  # noqa: B006
    record: options.Recorded = "full",
    full: options.Full = [],  # noqa: B006
    own_parameters: options.Own = False,
    compiled: options.OnCompiled = "eager",
    microbatch_grads: options.MicrobatchGrads = False,
    timeout: options.Timeout = 1800.0,
    json_output: options.Json = False,
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
    summary = listing.summarize(settings.written)
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
        select.Name,
        typer.Option(help="Where to compare: in threads or processes here, in this job of torchrun, or on Ray."),
    ] = "threads",
    workers: Annotated[int, typer.Option(min=0, help="How many compare; 0: one per core, up to eight.")] = 0,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", help="A rules file that decides the candidate's layouts again.")
    ] = None,
    fail_on: options.FailOn = "unjudged",
    baseline: options.BaselineFile = None,
    update_baseline: options.UpdateBaseline = False,
    junit_file: options.Junit = None,
    json_output: options.Json = False,
) -> None:
    """Judge the traces of a run again; nothing is run again."""
    given = None if rules is None else Rules.of(rules)
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    strictness = options.strictness(margin, allow)
    console = Console(stderr=json_output, quiet=not select.speaks(engine))
    folder = place(where)
    if isinstance(folder, Remote) and engine == "torchrun":  # what it kept is told apart by the run's own folder
        raise TTraceError("--engine torchrun needs the traces in a folder: copy them from the store, or use another.")
    run = Run(folder if isinstance(folder, Path) else Path())  # of what is in a store, the report is written here
    if isinstance(folder, Path):
        run.check_complete()
    # Of the ranks of a job only the first writes the report.
    speaks = select.speaks(engine)
    with (
        hold(run.folder) if speaks and isinstance(folder, Path) else nullcontext(),
        outcome.left_unjudged(run) if speaks and engine == "torchrun" else nullcontext(),
    ):
        with select.chosen(engine, workers, run, strictness) as chosen, screen.counted("check", console, *rate) as told:
            if isinstance(folder, Path):
                judgement = run.judged(strictness, rules=given, progress=told, engine=chosen)
            elif given is not None:
                raise TTraceError("--rules needs the traces in a folder: copy them from the store first.")
            else:
                judgement = stored.judged(folder, strictness, progress=told, engine=chosen)
        if speaks:
            known = outcome.baseline(baseline, judgement, update=update_baseline)
            outcome.tell(
                run,
                judgement,
                known,
                json_output=json_output,
                fail_on=fail_on,
                junit_file=junit_file,
                is_stored=isinstance(folder, Remote),
                leaves_code=engine == "torchrun",
            )


@app.command()
def report(
    folder: options.RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; RUN/report.html if not given.")
    ] = None,
    margin: options.Margin = MARGIN,
    allow: options.Allow = None,
) -> None:
    """Judge the traces of a run again and write the report as one HTML file, to be opened from disk."""
    Run(folder).check_complete()
    with hold(folder):
        with screen.counted("check", Console(stderr=True)) as told:
            judgement = Run(folder).judged(options.strictness(margin, allow), progress=told)
        screen.console().print(Text(f"report: {outcome.write_page(Run(folder), judgement, out)}"), soft_wrap=True)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN|TRACE", help="A run, or one trace.")],
    tensor: Annotated[
        str, typer.Argument(metavar="[ID]", help="A tensor id, a glob over ids, or a part of them.")
    ] = "*",
    json_output: options.Json = False,
) -> None:
    """List what was recorded, or everything known of one tensor: shards, regions, layouts, who decided them."""
    rows = listing.list_rows(folder, tensor)
    if json_output:
        typer.echo(json.dumps(rows))
    else:
        listing.show(screen.console(), folder, rows)


@app.command()
def diff(
    folder: options.RunFolder,
    tensor: Annotated[str, typer.Argument(metavar="ID", help="A tensor id.")],
    json_output: options.Json = False,
) -> None:
    """Show how one tensor of the candidate differs from the reference's: by rank, and where most."""
    Run(folder).check_complete()
    run = Run(folder).seen
    reference, candidate = Trace(run.reference), Trace(run.candidate)
    found = difference(reference, candidate, listing.find_id((reference, candidate), tensor))
    if json_output:
        typer.echo(json.dumps(difference_report.as_json(found)))
    else:
        difference_report.show(screen.console(), found, str(folder))


@app.command()
def archive(
    folder: options.RunFolder,
    restore: Annotated[bool, typer.Option("--restore", help="Bring the traces back as they were.")] = False,
    json_output: options.Json = False,
) -> None:
    """Keep a run's candidate and twins as differences to its reference, in a fraction of the space.

    Every other command reads them as before, only slower.
    """
    run = Run(folder)
    run.check_complete()
    with hold(folder):
        before = run.num_bytes()
        with screen.counted("restore" if restore else "archive", Console(stderr=json_output)) as told:
            (run.restore if restore else run.archive)(told)
        after = run.num_bytes()
        if json_output:
            typer.echo(json.dumps({"folder": str(folder), "bytes_before": before, "bytes_after": after}))
            return
        said = "as they were" if restore else "kept as differences to the reference"
        sizes = f"{sized(after)} in all, before {sized(before)}"
        screen.console().print(Text(f"{folder}: candidate and twins are {said}: {sizes}"), soft_wrap=True)


@app.command()
def lint(
    folder: options.RunFolder,
    suggest_rules: Annotated[
        bool, typer.Option("--suggest", help="Print a rules file that would state them, for attach(rules=...).")
    ] = False,
    margin: options.Margin = MARGIN,
    json_output: options.Json = False,
) -> None:
    """List the sites whose layout nobody stated, and what it seems to be."""
    judgement = Run(folder).judged(Strictness(margin))
    rows = suggest.find_unstated(judgement)
    if json_output:
        typer.echo(json.dumps({"sites": rows, "rules": suggest.suggest_rules(judgement)} if suggest_rules else rows))
    elif suggest_rules:
        typer.echo(suggest.suggest_rules(judgement), nl=False)
    else:
        for row in rows:
            layout = f' "{row["layout"]}"' if row["layout"] else ""
            typer.echo(f"{row['site']}: {row['how']}{layout}")
        typer.echo(f"next: ttrace lint {shlex.quote(str(folder))} --suggest" if rows else "every layout is stated")


@app.command()
def selftest(folder: options.RunFolder, margin: options.Margin = MARGIN, json_output: options.Json = False) -> None:
    """Put known faults into a clean run's tensors, in memory, and say which of them the check would reveal."""
    with screen.counted("selftest", Console(stderr=json_output)) as told:
        found = Run(folder).selftested(margin=margin, progress=told)
    if json_output:
        typer.echo(json.dumps(power_report.as_json(found)))
    else:
        power_report.show(screen.console(), found)
    raise typer.Exit(int(found.exit))


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Find silent bugs in distributed training by comparing it with a trusted reference."""
    if show_version:
        typer.echo(metadata.version("torch-ttrace"))
        raise typer.Exit


@contextmanager
def _interruptible(say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted: nothing is left running, and the same command goes on from here")
        raise
