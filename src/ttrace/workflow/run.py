"""Traces of a run, in a folder or in a store: where each of them is, and how they are judged."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Generic, Self, TypeVar

from ttrace.errors import NoTraceError, TTraceError
from ttrace.judge.check import judge_candidate
from ttrace.judge.compatibility import check_candidate, check_measured, check_role
from ttrace.judge.engine import Engine, OnProgress, collect_rarely, use_all_cores
from ttrace.judge.findings.isolated import combine
from ttrace.judge.margin import MARGIN
from ttrace.judge.policy import STRICT, Policy
from ttrace.judge.selftest import SelfTest, run_selftest
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.tolerance.run_to_run import Noise
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.rules import Rules
from ttrace.trace.format import MANIFEST
from ttrace.trace.reader import Trace
from ttrace.trace.relayout import RelayoutTrace
from ttrace.trace.seal import read_document
from ttrace.trace.store import Place, Remote, parse_place
from ttrace.untrusted import check_inside, parse_json, read_text
from ttrace.workflow.folder import CELLS
from ttrace.workflow.stages import check_launch, has_trace


@dataclass(frozen=True)
class Strictness:
    """How strict to be: the margin of tolerances, and the deviations that are allowed."""

    margin: float = MARGIN
    policy: Policy = STRICT

    @classmethod
    def load(cls, margin: float, allow: Path | None) -> Strictness:
        """Read the allowed deviations from a file, if there is one."""
        return cls(margin, STRICT if allow is None else Policy.load(allow))


AS_USUAL = Strictness()

_TWIN = re.compile("twin-[0-9]{1,9}")
MARK = "run.json"
"""The file by which a run's folder is known."""
REPORT, PAGE = "report.json", "report.html"
"""The reports that a check leaves in the folder."""
EXIT_CODE = "exit-code"
"""The file that has the exit code of a check by torchrun."""


AnyPlace = TypeVar("AnyPlace", Path, Remote)


@dataclass(frozen=True)
class RunTraces(Generic[AnyPlace]):
    """The traces of a run, side by side in a folder or below a URL in a store, and their judgement."""

    folder: AnyPlace

    @property
    def reference(self) -> AnyPlace:
        return self.folder / "reference"

    @property
    def candidate(self) -> AnyPlace:
        return self.folder / "candidate"

    @property
    def repeat(self) -> AnyPlace:
        """The second run of the candidate, kept if it differs from the first."""
        return self.folder / "repeat"

    @property
    def echo(self) -> AnyPlace:
        """The second iteration of the reference, kept if it differs from the first by no more than rounding does."""
        return self.folder / "echo"

    def twin(self, number: int) -> AnyPlace:
        return self.folder / f"twin-{number}"

    def twins(self) -> list[AnyPlace]:
        """Return the places of the twins. They are requested by name: a store may not list new objects."""
        return list(takewhile(has_trace, (self.twin(number) for number in count(1))))

    @property
    def isolated(self) -> Self:
        """The isolated run, with every module's inputs generated; there is one if something was found."""
        return replace(self, folder=self.folder / "isolated")

    @property
    def full(self) -> Self:
        """Reference and candidate again, with the tensors that were wrong in sketches recorded in full."""
        return replace(self, folder=self.folder / "full")

    @property
    def most_detailed(self) -> Self:
        """Where the most is recorded of reference and candidate."""
        return self.full if is_complete(self.full.reference) and is_complete(self.full.candidate) else self

    def check_complete(self) -> None:
        """Refuse a run without both traces; in a store, they are refused when they are opened."""

    @collect_rarely()
    def judge(
        self,
        strictness: Strictness = AS_USUAL,
        *,
        rules: Rules | None = None,
        progress: OnProgress | None = None,
        engine: Engine | None = None,
    ) -> Judgement:
        """Judge the candidate, with its repeat and its isolated run if there are any; no command runs.

        With `rules`, tensors that they match get other layouts than recorded. The isolated run is not used then: the
        inputs of its modules were generated for the recorded layouts.
        """
        judgement = self.judge_ordinary(strictness, rules=rules, progress=progress, engine=engine)
        if not judgement.findings or rules is not None or not is_complete(self.isolated.candidate):
            return judgement
        return combine(judgement, self.isolated.judge_ordinary(strictness, progress=progress, engine=engine))

    @collect_rarely()
    def judge_ordinary(
        self,
        strictness: Strictness = AS_USUAL,
        *,
        rules: Rules | None = None,
        progress: OnProgress | None = None,
        engine: Engine | None = None,
    ) -> Judgement:
        """Judge as `judge` does, but without the isolated run, which may be an earlier candidate's."""
        self.check_complete()
        engine = engine or use_all_cores()
        detailed = self.most_detailed  # this opens traces
        rounding, notes = self._measure_rounding(strictness.margin, progress, engine)
        if detailed is not self:
            rounding = replace(rounding, reference=open_trace(detailed.reference))
        candidate = _open_candidate(detailed.candidate, rules, rounding.reference)
        if rules is not None:
            _check_use(rules, candidate, self.folder)
        check_side(rounding.reference, "reference")
        check_side(candidate, "candidate")
        rounding, more_notes = self._add_candidate_noise(rounding, candidate, rules)
        judgement = judge_candidate(rounding, candidate, policy=strictness.policy, progress=progress, engine=engine)
        return replace(judgement, notes=tuple(notes + more_notes) + judgement.notes)

    def _measure_rounding(
        self, margin: float, progress: OnProgress | None, engine: Engine
    ) -> tuple[ToleranceModel, list[str]]:
        """Measure tolerances from the twins, and widen them by the reference's own run-to-run noise."""
        reference = open_trace(self.reference)
        twins, notes = choose_twins(self.twins(), self.folder)
        rounding = ToleranceModel.measure(reference, twins, margin, engine=engine, progress=progress)
        if not is_complete(self.echo):
            return rounding, notes
        echo = open_trace(self.echo)
        check_measured(echo, reference)
        noise = Noise.between(reference, echo, rounding, "reference")
        return noise.widen(rounding), notes + noise.notes(rounding)

    def _add_candidate_noise(
        self, rounding: ToleranceModel, candidate: Trace, rules: Rules | None
    ) -> tuple[ToleranceModel, list[str]]:
        """Widen tolerances by the candidate's run-to-run noise, if it ran twice with different results."""
        if not is_complete(self.repeat):
            return rounding, []
        repeat = _open_candidate(self.repeat, rules, rounding.reference)
        check_side(repeat, "candidate")
        check_candidate(repeat, rounding.reference)
        check_measured(repeat, open_trace(self.candidate))
        noise = Noise.between(candidate, repeat, rounding)
        return noise.widen(rounding), noise.notes(rounding)


@dataclass(frozen=True)
class Run(RunTraces[Path]):
    """A folder with the traces of reference, twins and candidate, and the reports on them."""

    def twins(self) -> list[Path]:
        """Return the folders of the twins, by number; one that is missing does not hide those after it."""
        folders = [path for path in self.folder.glob("twin-*") if _TWIN.fullmatch(path.name) and path.is_dir()]
        return sorted(folders, key=number_of_twin)

    def clear(self) -> None:
        """Remove all traces, and the marks of their stages."""
        traces = (self.reference, self.candidate, *self.twins(), self.echo, self.repeat)
        for folder in (*traces, self.isolated.folder, self.full.folder):
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("*.done.json", "*.launch"):
            for mark in self.folder.glob(name):
                mark.unlink()

    def clear_reports(self) -> None:
        """Remove the reports of an earlier check: if this one fails, an old report must not replace it."""
        for name in (REPORT, PAGE, EXIT_CODE):
            (self.folder / name).unlink(missing_ok=True)

    def copy_references(self, other: Run) -> None:
        """Copy the reference and its twins from another run; they come without marks, so a later run makes its own."""
        for trace in (other.reference, other.echo, *other.twins()):
            if has_trace(trace):
                shutil.copytree(trace, self.folder / trace.name)

    def check_complete(self) -> None:
        """Refuse a folder without both traces, and describe what it has instead."""
        self._check_links()
        missing = [path.name for path in (self.reference, self.candidate) if not has_trace(path)]
        if not missing:
            read_document(self.folder / MARK)
            return
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise TTraceError(f"{self.folder} {what}. Give the folder that `ttrace run --out` wrote.")
        if has_trace(self.folder):
            raise TTraceError(
                f"{self.folder} is one trace, not a run. Give the folder that `ttrace run --out` wrote, for instance "
                f"{self.folder.resolve().parent}."
            )
        if (self.folder / MARK).exists():
            raise TTraceError(
                f"{self.folder} is a run without a {missing[0]}: it was interrupted, or failed. Run the same "
                "`ttrace run` again to continue."
            )
        inside = sorted(path.parent.name for path in self.folder.glob(f"*/{MARK}"))
        hint = f" There are runs in it: {', '.join(inside[:5])}." if inside else " `ttrace run --out` makes one."
        raise TTraceError(f"{self.folder} holds no run.{hint}")

    def _check_links(self) -> None:
        """Refuse links that lead out of the run; cells of a sweep link to its shared references."""
        folder = self.folder.absolute()
        root = folder.parent.parent if folder.parent.name == CELLS else folder
        for path in (*self.folder.glob("*"), *self.isolated.folder.glob("*"), *self.full.folder.glob("*")):
            if path.is_symlink() and path.name not in (REPORT, PAGE, EXIT_CODE):  # those are replaced
                check_inside(path, root)

    def read_verdicts(self) -> dict[str, str]:
        """Read the verdicts that the last check wrote, by id; none if there is no report, or the traces are newer."""
        report = self.folder / REPORT
        traces = (self.folder.glob(f"{side.name}/rank-*/{MANIFEST}") for side in (self.reference, self.candidate))
        try:
            written = report.stat().st_mtime_ns
            if any(path.stat().st_mtime_ns > written for paths in traces for path in paths):
                return {}
            return {tensor["id"]: tensor["verdict"] for tensor in parse_json(read_text(report), report)["tensors"]}
        except (OSError, ValueError, TypeError, LookupError, TTraceError):  # absent, or no report
            return {}

    def selftest(self, *, margin: float = MARGIN, progress: OnProgress | None = None) -> SelfTest:
        """Find out which faults the check of this run would reveal; the run must be clean."""
        self.check_complete()
        twins, _ = choose_twins(self.twins(), self.folder)
        rounding = ToleranceModel.measure(open_trace(self.reference), twins, margin)
        candidate = open_trace(self.candidate)
        judgement = judge_candidate(rounding, candidate)
        if judgement.findings:
            raise TTraceError(
                f"{self.folder} has findings, and a selftest needs a run without any. `ttrace check {self.folder}` "
                "lists them."
            )
        return run_selftest(rounding, candidate, judgement, progress=progress)

    def next_command(self, judgement: Judgement) -> str:
        """Return the command to type next."""
        folder = shlex.quote(str(self.folder))
        if judgement.findings:
            return f"ttrace diff {folder} {shlex.quote(str(judgement.findings[0].comparison.id))}"
        spoilt = next((comparison for comparison in judgement.comparisons if comparison.spoils), None)
        if spoilt is not None:
            return f"ttrace show {folder} {shlex.quote(str(spoilt.id))}"
        return f"ttrace selftest {folder}" if judgement.exit is Exit.PASSED else f"ttrace show {folder}"


def open_run(where: str | Path) -> Run | RunTraces[Remote]:
    """Open the run in a folder, or the traces of one below a URL."""
    place = parse_place(str(where))
    return RunTraces(place) if isinstance(place, Remote) else Run(place)


def check(
    run: str | Path,
    *,
    margin: float = MARGIN,
    allow: Path | None = None,
    rules: Mapping[str, str] | str | Path | None = None,
) -> Judgement:
    """Judge the traces of a run again, as `ttrace check` does, and return the judgement.

    `run` is the folder that `ttrace run --out` wrote, or the URL of its traces in a store. Tolerances are `margin`
    times the rounding error that the twins show. `allow` is a file of known deviations. `rules`, a table or a file,
    decides the candidate's layouts again. No command runs, and no report is written.
    """
    return open_run(run).judge(Strictness.load(margin, allow), rules=None if rules is None else Rules.of(rules))


def _check_use(rules: Rules, candidate: Trace, folder: Place) -> None:
    """Refuse rules of which none matches a tensor: the check would be one of the recorded layouts."""
    _ = candidate.shards  # every rule has been tried by now
    unused = rules.list_unused()
    if len(unused) == len(rules.rules):
        names = f"{', '.join(map(str, unused[:3]))} matched nothing" if unused else "they contain no rule"
        raise TTraceError(
            f"these rules change no layout: {names}. `ttrace show {shlex.quote(str(folder))}` lists the names that a "
            "rule can match."
        )


def open_trace(folder: Place) -> Trace:
    """Open a trace that one launch wrote, the one that was marked as done."""
    trace = Trace(folder)
    check_launch(trace)
    return trace


def _open_candidate(folder: Place, rules: Rules | None, reference: Trace) -> Trace:
    """Open a candidate's trace; with `rules`, the layouts of tensors that they match are decided again."""
    trace = Trace(folder) if rules is None else RelayoutTrace(folder, rules, reference)
    check_launch(trace)
    return trace


def number_of_twin(path: Path) -> int:
    return int(path.name.removeprefix("twin-"))


def choose_twins(places: Iterable[Place], where: Place) -> tuple[list[Trace], list[str]]:
    """Open the twins that finished, with a note on each that did not; refuse a run without any."""
    twins, notes = list[Trace](), list[str]()
    for place in places:
        try:
            twin = open_trace(place)
            gap = next(twin.gaps(), None)
        except NoTraceError:
            gap = "it has no trace"
        if gap is None:
            check_role(twin, "twin")
            twins.append(twin)
        else:
            notes.append(f"{place.name} was left out, as it is not complete: {gap}")
    if not twins:
        raise TTraceError(
            f"{where} holds no complete twin, but tolerances come from twins.{''.join(f' {note}.' for note in notes)} "
            "The same `ttrace run` again makes what is missing, or `ttrace trace --twin 1`."
        )
    return twins, notes


def check_side(trace: Trace, role: str) -> None:
    """Refuse a trace of another role, or one that a rank did not finish."""
    check_role(trace, role)
    for gap in trace.gaps():
        raise TTraceError(f"{gap}, so nothing can be judged. Trace again: the same `ttrace run` makes what is missing.")


def is_complete(folder: Place) -> bool:
    """Whether every rank left a trace and finished it."""
    return has_trace(folder) and not any(Trace(folder).gaps())
