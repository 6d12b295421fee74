"""This module runs reference, twins and candidate into one folder, and what is needed to be sure of a finding.

What was done before, and would be done again in the same way, is not: a run that was cut off goes on where it was.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from ttrace.capture.plan import Plan, claim_of
from ttrace.errors import TTraceError
from ttrace.judge.findings.isolated import combined
from ttrace.judge.tolerance.run_to_run import is_repeated
from ttrace.judge.verdict import Judgement
from ttrace.tensors.ids import ROOT
from ttrace.trace.reader import Trace
from ttrace.trace.storage.seal import seal_document
from ttrace.workflow.disk_space import Space
from ttrace.workflow.git import state_of
from ttrace.workflow.launch import Launches
from ttrace.workflow.lock import is_empty
from ttrace.workflow.run import AS_USUAL, MARK, Run, Strictness, is_complete, number_of_twin
from ttrace.workflow.stages import Stage

Tell = Callable[[str], None]

_MOST_FULL = 5
"""Findings of which the modules' tensors are recorded in full."""


@dataclass(frozen=True)
class Commands:
    """What to run, and how long it may take."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]
    num_twins: int
    timeout: float


@dataclass(frozen=True)
class Flow:
    """Fills a run's folder. `settings` holds what is common to all plans."""

    run: Run
    commands: Commands
    settings: Plan
    strictness: Strictness = AS_USUAL
    begin: Tell = lambda _: None
    """Told what is done next."""
    say: Tell = lambda _: None
    """Told what is worth a line."""
    launches: Launches | None = None
    """For flows in several threads: what ends all that they have launched."""

    def check_folder(self) -> None:
        """Refuse a folder that holds something else than a run."""
        folder = self.run.folder
        try:
            is_other = not is_empty(folder) and not (folder / MARK).exists()
        except OSError as error:
            raise TTraceError(f"{folder} cannot be read: {error}. Choose another --out.") from None
        if is_other:
            raise TTraceError(f"{folder} is not empty and holds no earlier run. Choose another --out.")

    def prepare(self, *, fresh: bool = False) -> None:
        """Take the folder, if it is empty or an earlier run's; with `fresh`, forget that run."""
        run = self.run
        self.check_folder()
        known = {
            "reference": shlex.join(self.commands.reference),
            "candidate": shlex.join(self.commands.candidate),
            "folder": str(Path.cwd()),
            "git": state_of(Path.cwd()),
            "ttrace": metadata.version("torch-ttrace"),
        }
        try:
            if fresh:
                run.clear()
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / MARK).write_text(seal_document(json.dumps(known, indent=1)), encoding="utf-8")
        except OSError as error:
            raise TTraceError(f"{run.folder} cannot be written: {error}. Choose another --out.") from None

    def trace(self) -> None:
        """Trace reference, twins and candidate; what of an earlier run no longer belongs to them is removed."""
        self.trace_references()
        self.trace_candidate()

    def trace_references(self) -> None:
        """Trace the reference and its twins, without more of those than asked for."""
        for twin in self.run.twins():
            if number_of_twin(twin) > self.commands.num_twins:
                shutil.rmtree(twin)
        self._trace_references(self.run, self.settings, self.commands.num_twins)

    def trace_candidate(self, *, fresh: bool = False) -> None:
        """Trace the candidate of a reference that is there; with `fresh`, whatever an earlier run left."""
        if fresh:
            self._candidate(self.run, self.settings, self.run.candidate).clear()
        if not self._traced("candidate", self._candidate(self.run, self.settings, self.run.candidate)):
            self._candidate(self.run, self.settings, self.run.repeat).clear()
            shutil.rmtree(self.run.isolated.candidate, ignore_errors=True)
            shutil.rmtree(self.run.full.candidate, ignore_errors=True)

    def repeated(self, found: Judgement) -> Judgement:
        """What was found, judged again with the candidate's own noise if a second run of it differs from the first."""
        run, stage = self.run, self._candidate(self.run, self.settings, self.run.repeat)
        try:
            Space.after(run.reference, run.folder, 1).check()
            if not stage.is_done():
                self._run("candidate again", stage)
            if is_complete(run.repeat) and not is_repeated(Trace(run.candidate), Trace(run.repeat)):
                return run.judged(self.strictness, isolated=False)
        except TTraceError as error:
            found = replace(found, notes=(*found.notes, f"the candidate could not be run a second time: {error}"))
        shutil.rmtree(run.repeat, ignore_errors=True)  # its mark stays: a repeat without a trace was the same
        return found

    def in_full(self, found: Judgement) -> Judgement:
        """What was found in sketches, judged again with the values of what was wrong first."""
        run, worst = self.run, found.findings[:_MOST_FULL]
        names = dict.fromkeys(name for finding in worst for name in (finding.module, finding.comparison.id.name))
        sites = [site for name in names for site in ((name,) if name == ROOT else (name, f"{name}.*"))]
        settings = self.settings.model_copy(update={"full": (*self.settings.full, *sites)})
        try:
            plan = settings.model_copy(update={"out": run.full.reference})
            self._traced("reference in full", Stage(self.commands.reference, plan))
            self._traced("candidate in full", self._candidate(run, settings, run.full.candidate))
            return run.judged(self.strictness, isolated=False)
        except TTraceError as error:
            shutil.rmtree(run.full.folder, ignore_errors=True)
            return replace(found, notes=(*found.notes, f"what was wrong could not be recorded in full: {error}"))

    def isolated(self, found: Judgement) -> Judgement:
        """What was found, with what an isolated run adds to it; a script that fails in isolation adds a note."""
        try:
            self._trace_isolated(tuple(dict.fromkeys(finding.module for finding in found.findings)))
            self.begin("isolated check")
            return combined(found, self.run.isolated.judged(self.strictness))
        except TTraceError as error:
            shutil.rmtree(self.run.isolated.folder, ignore_errors=True)
            return replace(found, notes=(*found.notes, f"the isolated run failed: {error}"))

    def _trace_isolated(self, inside: tuple[str, ...]) -> None:
        """Trace all of them again, into the run's folder `isolated`, with every module's inputs generated.

        One twin is enough: only what was wrong in the ordinary run can be accused by this one.
        """
        run = self.run
        alone = self.settings.model_copy(
            update={"isolated": True, "reference": run.reference.resolve(), "inside": inside}
        )
        factor = Trace(run.candidate).grad_factor / Trace(run.reference).grad_factor
        self._trace_references(run.isolated, alone, 1, "isolated ")
        plan = alone.model_copy(update={"grad_factor": factor})
        self._traced("isolated candidate", self._candidate(run.isolated, plan, run.isolated.candidate))

    def _trace_references(self, run: Run, settings: Plan, num_twins: int, prefix: str = "") -> None:
        """The reference and its twins, in one launch if the script allows it."""
        reference = Stage(self.commands.reference, settings.model_copy(update={"out": run.reference}))
        known = settings.model_copy(update={"reference": run.reference.resolve()})
        twins = [self._twin(run, known, number) for number in range(1, num_twins + 1)]
        if _is_kept(reference):
            self.say(f"{prefix}reference: kept, nothing that it was made from has changed")
        else:
            echo = Stage(self.commands.reference, known.model_copy(update={"out": run.echo, "role": "echo"}))
            self._run(f"{prefix}reference and twins", reference, then=(echo, *twins))
            self._accept(reference, echo, twins)
        missing = {number: twin for number, twin in enumerate(twins, 1) if not _is_kept(twin)}
        num_missing = len(missing) + (not _is_kept(self._candidate(run, settings, run.candidate)))
        if num_missing:
            space = Space.after(run.reference, run.folder, num_missing)
            if not prefix:  # an isolated run takes about as much, and that has just been told
                self.say(str(space))
            space.check()
        for number, twin in missing.items():
            self._run(f"{prefix}twin {number} of {num_twins}", twin)

    def _accept(self, reference: Stage, echo: Stage, twins: list[Stage]) -> None:
        """Take the twins of the same launch, if an iteration without a nudge repeated the reference bit for bit."""
        if echo.is_complete() and is_repeated(reference.trace, echo.trace):
            for twin in twins:
                if twin.is_complete():
                    twin.mark()
        elif echo.is_complete():
            self.say("the reference's iterations differ by themselves: each twin gets a launch of its own")
        shutil.rmtree(echo.plan.out, ignore_errors=True)
        claim_of(echo.plan.out).unlink(missing_ok=True)

    def _twin(self, run: Run, known: Plan, number: int) -> Stage:
        plan = known.model_copy(update={"out": run.twin(number), "role": "twin", "twin": number})
        return Stage(self.commands.reference, plan)

    def _candidate(self, run: Run, settings: Plan, out: Path) -> Stage:
        known = {"reference": run.reference.resolve(), "out": out, "role": "candidate"}
        return Stage(self.commands.candidate, settings.model_copy(update=known))

    def _traced(self, name: str, stage: Stage) -> bool:
        """Make the trace; whether an earlier one was kept."""
        if _is_kept(stage):
            self.say(f"{name}: kept, nothing that it was made from has changed")
            return True
        self._run(name, stage)
        return False

    def _run(self, name: str, stage: Stage, *, then: tuple[Stage, ...] = ()) -> None:
        self.begin(name)
        stage.run(timeout=self.commands.timeout, then=then, launches=self.launches)


def _is_kept(stage: Stage) -> bool:
    return stage.is_done() and stage.is_complete()
