"""This module runs reference, twins and candidate into one folder, and judges that folder."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.judge.check import Progress, checked
from ttrace.judge.isolated import combined
from ttrace.judge.noise import Noise, is_repeated
from ttrace.judge.policy import STRICT, Policy
from ttrace.judge.power import SelfTest, selftest
from ttrace.judge.tolerance import MARGIN
from ttrace.judge.twins import Twins
from ttrace.judge.verdict import Judgement
from ttrace.trace.format import MANIFEST
from ttrace.trace.reader import Trace
from ttrace.workflow.launch import launch
from ttrace.workflow.space import Space

_MARK = "run.json"


@dataclass(frozen=True)
class Strictness:
    """How strict to be."""

    margin: float = MARGIN
    policy: Policy = STRICT


AS_USUAL = Strictness()


@dataclass(frozen=True)
class Run:
    """A folder with the traces of reference, twins and candidate."""

    folder: Path

    @property
    def reference(self) -> Path:
        return self.folder / "reference"

    @property
    def candidate(self) -> Path:
        return self.folder / "candidate"

    @property
    def repeat(self) -> Path:
        """The candidate a second time, kept where it differs from the first."""
        return self.folder / "repeat"

    def twin(self, number: int) -> Path:
        return self.folder / f"twin-{number}"

    @property
    def isolated(self) -> Run:
        """The same with every module's inputs generated, run when something was found."""
        return Run(self.folder / "isolated")

    def twins(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("twin-*") if path.is_dir())

    def judged(self, strictness: Strictness = AS_USUAL, *, progress: Progress | None = None) -> Judgement:
        """Check the candidate, with its repeat and its isolated run where there are; runs nothing again."""
        rounding = Twins(Trace(self.reference), [Trace(path) for path in self.twins()], strictness.margin)
        candidate, notes = Trace(self.candidate), list[str]()
        if self.repeat.is_dir():
            noise = Noise.between(candidate, Trace(self.repeat), rounding)
            notes, rounding = noise.notes(rounding), noise.added(rounding)
        found = checked(rounding, candidate, policy=strictness.policy, progress=progress)
        found = replace(found, notes=(*notes, *found.notes))
        if not found.findings or not self.isolated.candidate.is_dir():
            return found
        return combined(found, self.isolated.judged(strictness, progress=progress))

    def selftested(self, *, margin: float = MARGIN, progress: Progress | None = None) -> SelfTest:
        """What the check of this run, which must be clean, would have revealed."""
        twins, candidate = [Trace(path) for path in self.twins()], Trace(self.candidate)
        rounding = Twins(Trace(self.reference), twins, margin)
        found = checked(rounding, candidate)
        if found.findings:
            raise TTraceError(
                f"{self.folder} has findings, and a selftest needs a run without any. `ttrace check {self.folder}` "
                "tells them."
            )
        return selftest(rounding, candidate, found, progress=progress)

    def next_command(self, judgement: Judgement) -> str:
        """What to type next."""
        folder = shlex.quote(str(self.folder))
        if judgement.findings:
            return f"ttrace diff {folder} {shlex.quote(str(judgement.findings[0].comparison.id))}"
        spoilt = next((comparison for comparison in judgement.comparisons if comparison.spoils), None)
        if spoilt is not None:
            return f"ttrace show {folder} {shlex.quote(str(spoilt.id))}"
        return f"ttrace show {folder}"


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Commands:
    """What to run, and how long it may take."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]
    num_twins: int
    timeout: float


def run_all(run: Run, commands: Commands, settings: Plan, stage: Tell, say: Tell) -> None:
    """Trace reference, twins and candidate. `settings` holds what is common to all of them.

    `stage` is told what runs now, `say` what is worth a line: once the reference is there, the space all will take.
    """
    _prepare(run, {"reference": commands.reference, "candidate": commands.candidate})
    say(str(_trace_reference(run, commands, settings, stage)))
    _trace_others(run, commands, settings, stage)


def run_isolated(run: Run, commands: Commands, settings: Plan, stage: Tell) -> None:
    """Trace all of them again, into the run's folder `isolated`, with every module's inputs generated.

    One twin is enough: only what was wrong in the ordinary run can be accused by this one.
    """
    shutil.rmtree(run.isolated.folder, ignore_errors=True)
    alone = settings.model_copy(update={"isolated": True, "reference": run.reference.resolve()})
    factor = Trace(run.candidate).grad_factor / Trace(run.reference).grad_factor
    few = replace(commands, num_twins=1)

    def isolated_stage(name: str) -> None:
        stage(f"isolated {name}")

    _trace_reference(run.isolated, few, alone, isolated_stage)
    _trace_others(run.isolated, few, alone, isolated_stage, grad_factor=factor)


def isolated(
    run: Run,
    commands: Commands,
    settings: Plan,
    stage: Tell,
    found: Judgement,
    strictness: Strictness = AS_USUAL,
) -> Judgement:
    """What was found, with what an isolated run adds to it; a script that fails in isolation adds a note."""
    try:
        inside = tuple(dict.fromkeys(finding.module for finding in found.findings))
        run_isolated(run, commands, settings.model_copy(update={"inside": inside}), stage)
        stage("isolated check")
        return combined(found, run.isolated.judged(strictness))
    except TTraceError as error:
        shutil.rmtree(run.isolated.folder, ignore_errors=True)
        return replace(found, notes=(*found.notes, f"the isolated run failed: {error}"))


def repeated(
    run: Run,
    commands: Commands,
    settings: Plan,
    stage: Tell,
    found: Judgement,
    strictness: Strictness = AS_USUAL,
) -> Judgement:
    """What was found, judged again with the candidate's own noise if a second run of it differs from the first."""
    try:
        Space.after(run.reference, run.folder, 1).check()
        stage("candidate again")
        plan = _candidate_plan(settings, run, run.repeat)
        again = traced(commands.candidate, plan, timeout=commands.timeout)
        if not is_repeated(Trace(run.candidate), again):
            return run.judged(strictness)
    except TTraceError as error:
        found = replace(found, notes=(*found.notes, f"the candidate could not be run a second time: {error}"))
    shutil.rmtree(run.repeat, ignore_errors=True)
    return found


def _candidate_plan(settings: Plan, run: Run, out: Path) -> Plan:
    return settings.model_copy(update={"reference": run.reference.resolve(), "out": out, "role": "candidate"})


def _trace_reference(run: Run, commands: Commands, settings: Plan, stage: Tell) -> Space:
    """Trace the reference; the space that the rest will take, which there is."""
    stage("reference")
    plan = settings.model_copy(update={"out": run.reference})
    traced(commands.reference, plan, timeout=commands.timeout)
    space = Space.after(run.reference, run.folder, commands.num_twins + 1)
    space.check()
    return space


def _trace_others(run: Run, commands: Commands, settings: Plan, stage: Tell, *, grad_factor: float = 1.0) -> None:
    known = settings.model_copy(update={"reference": run.reference.resolve()})
    for number in range(1, commands.num_twins + 1):
        stage(f"twin {number} of {commands.num_twins}")
        plan = known.model_copy(update={"out": run.twin(number), "role": "twin", "twin": number})
        traced(commands.reference, plan, timeout=commands.timeout)
    stage("candidate")
    plan = _candidate_plan(settings, run, run.candidate).model_copy(update={"grad_factor": grad_factor})
    traced(commands.candidate, plan, timeout=commands.timeout)


def traced(command: tuple[str, ...], plan: Plan, *, timeout: float) -> Trace:
    """Run a command under a plan; its trace, which is complete. An earlier trace in the same place is removed."""
    _clear(plan)
    launched = launch(command, plan, timeout=timeout)
    words = shlex.join(command)
    if launched.status != 0:
        raise TTraceError(
            f"{words} ended with status {launched.status}:\n{launched.complaint()}\n(from {launched.log})"
        )
    if not any(plan.out.glob(f"rank-*/{MANIFEST}")):
        raise TTraceError(
            f"{words} ended well but left no trace. Does the script call ttrace.attach(model, optimizer)? Its output "
            f"is in {launched.log}."
        )
    trace = Trace(plan.out)
    unfinished = [rank for rank in trace.ranks if rank.end is None]
    if unfinished:
        raise TTraceError(
            f"{words} ended well, but its rank {unfinished[0].manifest.rank} never finished the traced steps. Does "
            f"every rank run its step inside `with session.step():`, and often enough? Its output is in {launched.log}."
        )
    return trace


def _clear(plan: Plan) -> None:
    """Whatever lies here afterwards was made by this plan, on every rank."""
    if plan.reference is not None and plan.reference.resolve() == plan.out.resolve():
        raise TTraceError(f"{plan.out} holds the reference. Choose another --out.")
    for manifest in plan.out.glob(f"rank-*/{MANIFEST}"):
        shutil.rmtree(manifest.parent)


def _prepare(run: Run, commands: dict[str, tuple[str, ...]]) -> None:
    """Empty the folder of an earlier run; never one that is not ours."""
    if run.folder.is_dir() and any(run.folder.iterdir()) and not (run.folder / _MARK).exists():
        raise TTraceError(f"{run.folder} is not empty and holds no earlier run. Choose another --out.")
    for old in (run.reference, run.candidate, *run.twins(), run.repeat, run.isolated.folder):
        shutil.rmtree(old, ignore_errors=True)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TTraceError(f"{run.folder} cannot be made: {error}. Choose another --out.") from None
    text = json.dumps({role: shlex.join(command) for role, command in commands.items()}, indent=1)
    (run.folder / _MARK).write_text(text)
