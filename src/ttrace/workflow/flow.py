"""Traces of a run: reference, twins and candidate in one folder, and those that follow up a finding.

A trace that an earlier run left, and that would come out the same now, is kept: a run that was interrupted continues
where it stopped.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ttrace.capture.plan import Plan, claim_of
from ttrace.errors import TraceError, TTraceError
from ttrace.judge.engine import use_all_cores
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise, is_repeated
from ttrace.report.facts import format_bytes
from ttrace.trace.reader import Trace
from ttrace.trace.seal import read_document, seal_document
from ttrace.untrusted import replace_file
from ttrace.workflow.folder import DiskSpace, is_empty
from ttrace.workflow.launch import Launches, describe_commit
from ttrace.workflow.run import MARK, Run, number_of_twin
from ttrace.workflow.stages import Stage, change, watch_stages

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Commands:
    """What to run, and how long it may take."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]
    num_twins: int
    timeout: float
    resume: tuple[str, ...] = ()
    """The candidate's second launch, which loads the checkpoint that the first one has saved; empty for none."""


@dataclass(frozen=True)
class Flow:
    """Fills a run's folder with traces. `settings` holds what is common to all plans."""

    run: Run
    commands: Commands
    settings: Plan
    on_stage: OnText = lambda _: None
    """Called with the name of each stage when it begins, and with an empty one when a launch has ended."""
    on_note: OnText = lambda _: None
    """Called with each line that is worth showing."""
    launches: Launches | None = None
    """For flows in several threads: what ends all that they have launched."""

    def check_folder(self) -> None:
        """Refuse a folder that holds something other than a run."""
        folder = self.run.folder
        try:
            is_other = not is_empty(folder) and not (folder / MARK).exists()
        except OSError as error:
            raise TTraceError(f"{folder} cannot be read: {error}. Choose another --out.") from None
        if is_other:
            raise TTraceError(f"{folder} is not empty and holds no earlier run. Choose another --out.")

    def prepare(self, *, fresh: bool = False) -> None:
        """Take the folder, if it is empty or an earlier run's, and remove that run's reports.

        With `fresh`, remove that run's traces too.
        """
        run = self.run
        self.check_folder()
        about = {
            "reference": shlex.join(self.commands.reference),
            "candidate": shlex.join(self.commands.candidate),
            **({"resume": shlex.join(self.commands.resume)} if self.commands.resume else {}),
            "folder": str(Path.cwd()),
            "git": describe_commit(Path.cwd()),
            "ttrace": metadata.version("torch-ttrace"),
        }
        try:
            if fresh:
                run.clear()
            self._note_other_commands(about)
            run.clear_reports()
            run.folder.mkdir(parents=True, exist_ok=True)
            replace_file(run.folder / MARK, seal_document(json.dumps(about, indent=1)))
        except OSError as error:
            raise TTraceError(f"{run.folder} cannot be written: {error}. Choose another --out.") from None

    def _note_other_commands(self, about: Mapping[str, str]) -> None:
        """Report that an earlier run of different commands is replaced: the user may have wanted to keep it."""
        try:
            earlier = read_document(self.run.folder / MARK)
        except TraceError:  # it is damaged, and will be replaced
            return
        others = [side for side in ("reference", "candidate") if side in earlier and earlier[side] != about[side]]
        if others:
            self.on_note(
                f"{self.run.folder} had a run with another {' and another '.join(others)}: its traces are replaced "
                "(use another --out to keep both)"
            )

    def trace(self) -> None:
        """Trace reference, twins and candidate; what of an earlier run no longer belongs to them is removed."""
        self.trace_references()
        self.trace_candidate()

    def trace_references(self) -> None:
        """Trace the reference and its twins; twins beyond the number asked for are removed."""
        for twin in self.run.twins():
            if number_of_twin(twin) > self.commands.num_twins:
                shutil.rmtree(twin)
        self._trace_references(self.run, self.settings, self.commands.num_twins)

    def trace_candidate(self, *, fresh: bool = False) -> None:
        """Trace the candidate of a reference that is there; with `fresh`, also where an earlier trace could be kept."""
        if fresh:
            self._candidate(self.run, self.settings, self.run.candidate).clear()
        if not self._trace_or_keep("candidate", self._candidate(self.run, self.settings, self.run.candidate)):
            self._make_repeat().clear()
            shutil.rmtree(self.run.isolated.candidate, ignore_errors=True)
            shutil.rmtree(self.run.full.candidate, ignore_errors=True)

    def trace_repeat(self, sites: Sequence[str] = ()) -> None:
        """Trace the candidate a second time, unless that was done before; the values of these sites are stored."""
        stage = self._make_repeat(sites)
        if not stage.is_done():
            self._run("repeat", stage)

    def trace_in_full(self, sites: Sequence[str]) -> None:
        """Trace reference and candidate again, into the run's folder `full`, with these sites recorded in full."""
        run = self.run
        settings = change(self.settings, full=(*self.settings.full, *sites))
        # Of all other sites it records what the first one did.
        plan = change(settings, out=run.full.reference, reference=run.reference.resolve())
        self._trace_or_keep("reference in full", Stage(self.commands.reference, plan))
        self._trace_or_keep("candidate in full", self._candidate(run, settings, run.full.candidate))

    def trace_isolated(self, inside: tuple[str, ...]) -> None:
        """Trace all of them again, into the run's folder `isolated`, with every module's inputs generated.

        The calls of torch functions inside the modules `inside` are recorded too, unless the two sides are different
        implementations, which call different ones. One twin is enough: the isolated run accuses only what was wrong in
        the ordinary run.
        """
        run = self.run
        inside = inside if self.settings.port is None else ()
        settings = change(self.settings, isolated=True, reference=run.reference.resolve(), inside=inside)
        factor = Trace(run.candidate).grad_factor / Trace(run.reference).grad_factor
        self._trace_references(run.isolated, settings, 1, "isolated ")
        plan = change(settings, grad_factor=factor)
        self._trace_or_keep("isolated candidate", self._candidate(run.isolated, plan, run.isolated.candidate))

    def _trace_references(self, run: Run, settings: Plan, num_twins: int, prefix: str = "") -> None:
        """Trace the reference and its twins, in one launch if the script allows it."""
        reference = Stage(self.commands.reference, change(settings, out=run.reference))
        known = change(settings, reference=run.reference.resolve())
        twins = {
            f"{prefix}twin {number}/{num_twins}": self._twin(run, known, number) for number in range(1, num_twins + 1)
        }
        echo = Stage(self.commands.reference, change(known, out=run.echo, role="echo"))
        if _is_kept(reference):
            self._note_kept(f"{prefix}reference")
            if not _is_kept(echo):
                echo.clear()  # an interrupted run has not compared it with the reference
        else:
            self._run(f"{prefix}reference", reference, then={f"{prefix}reference again": echo, **twins})
            self._accept_twins(reference, echo, list(twins.values()))
        missing = {name: twin for name, twin in twins.items() if not _is_kept(twin)}
        if not _is_kept(self._candidate(run, settings, run.candidate)):
            space = DiskSpace.after(run.reference, run.folder)
            if not prefix:  # an isolated run takes about as much as the ordinary one
                self._note_space(reference.trace, space)
            space.check()
        for name, twin in missing.items():
            self._run(name, twin)

    def _accept_twins(self, reference: Stage, echo: Stage, twins: list[Stage]) -> None:
        """Keep the twins of the same launch, if an iteration without a nudge repeated the reference.

        If it did so bit for bit, it is not needed any more. If sums had another order, what that changed belongs to the
        tolerances. If it differs by more, the script could not be brought back to where it started.
        """
        complete = [twin for twin in twins if twin.is_complete()] if echo.is_complete() else []
        is_same = bool(complete) and is_repeated(reference.trace, echo.trace)
        is_noisy = bool(complete) and not is_same and self._differs_by_rounding(reference, echo, complete)
        if is_same or is_noisy:
            for twin in complete:
                twin.mark()
        elif complete:
            self.on_note("the reference's iterations differ by themselves: each twin gets a launch of its own")
        if is_noisy:
            echo.mark()
        else:
            shutil.rmtree(echo.plan.out, ignore_errors=True)
            claim_of(echo.plan.out).unlink(missing_ok=True)

    def _differs_by_rounding(self, reference: Stage, echo: Stage, twins: list[Stage]) -> bool:
        try:
            traces = [twin.trace for twin in twins]
            rounding = ToleranceModel.measure(reference.trace, traces, engine=use_all_cores())
            noise = Noise.between(reference.trace, echo.trace, rounding, "reference")
        except TTraceError:  # they do not have the same tensors
            return False
        return noise.stats.keys() == rounding.tolerances.keys() and noise.is_rounding(rounding)

    def _twin(self, run: Run, known: Plan, number: int) -> Stage:
        plan = change(known, out=run.twin(number), role="twin", twin=number)
        return Stage(self.commands.reference, plan)

    def _make_repeat(self, sites: Sequence[str] = ()) -> Stage:
        first = change(self.settings, full=(*self.settings.full, *sites), repeats=self.run.candidate.resolve())
        return self._candidate(self.run, first, self.run.repeat)

    def _candidate(self, run: Run, settings: Plan, out: Path) -> Stage:
        """Make the candidate's stage; if it has two launches, that of the second, which trains the last step."""
        plan = change(settings, reference=run.reference.resolve(), out=out, role="candidate")
        if not self.commands.resume:
            return Stage(self.commands.candidate, plan)
        last = change(plan, first_step=plan.num_steps - 1, num_steps=1, parameters="own")
        return Stage(self.commands.resume, last)

    def _save_checkpoint(self, out: Path) -> None:
        """Run the first launch of a candidate that has two: all steps but the last, and whatever it does then."""
        plan = change(
            self.settings,
            reference=self.run.reference.resolve(),
            out=out.with_name(f"{out.name}-before"),
            role="candidate",
            num_steps=self.settings.num_steps - 1,
            only=("nothing",),  # parameters and batches are always recorded
            stop=False,
        )
        stage = Stage(self.commands.candidate, plan)
        self._run("candidate until its checkpoint", stage)
        stage.clear()  # its trace is not used

    def _trace_or_keep(self, name: str, stage: Stage) -> bool:
        """Make the trace, unless an earlier one can be kept; return whether it was kept."""
        if _is_kept(stage):
            self._note_kept(name)
            return True
        self._run(name, stage)
        return False

    def _note_space(self, reference: Trace, space: DiskSpace) -> None:
        """Report in one line what is not recorded in full or, if everything is, the disk space that is needed."""
        sketched, num = reference.count_sketches()
        if sketched and self.settings.record == "auto":
            self.on_note(
                f"{sketched} of {num} tensors are recorded as sketches: in full, the traces of both sides would take "
                f"more than {format_bytes(self.settings.budget)} (--budget). What is wrong is recorded in full later"
            )
        elif space.is_noteworthy:
            self.on_note(str(space))

    def _note_kept(self, name: str) -> None:
        self.on_note(f"{name}: kept, nothing that it was made from has changed")

    def _run(self, name: str, stage: Stage, *, then: dict[str, Stage] | None = None) -> None:
        """Run a stage, and in the same launch those that follow it, by name."""
        then = then or {}
        if self.commands.resume and stage.plan.role == "candidate" and stage.plan.first_step:
            self._save_checkpoint(stage.plan.out)
        for following in then.values():
            following.clear()  # an earlier trace would look like the beginning of a new one
        self.on_stage(name)
        with watch_stages({each: following.plan.out for each, following in then.items()}, self.on_stage):
            stage.run(timeout=self.commands.timeout, then=tuple(then.values()), launches=self.launches)
        self.on_stage("")


def _is_kept(stage: Stage) -> bool:
    return stage.is_done() and stage.is_complete()
