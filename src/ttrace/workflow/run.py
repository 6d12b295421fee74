"""Folder of a run: where its traces and reports are, and how it is judged."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ttrace.errors import NoTraceError, TTraceError
from ttrace.files import check_inside, read_text
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
from ttrace.trace.archive import archive, restore
from ttrace.trace.format import MANIFEST
from ttrace.trace.reader import Trace
from ttrace.trace.relayout import RelayoutTrace
from ttrace.trace.seal import read_document
from ttrace.trace.store import Place
from ttrace.untrusted import parse_json
from ttrace.workflow.folder import CELLS
from ttrace.workflow.stages import check_launch


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
        """The second run of the candidate, kept if it differs from the first."""
        return self.folder / "repeat"

    @property
    def echo(self) -> Path:
        """The second iteration of the reference, kept if it differs from the first by no more than rounding does."""
        return self.folder / "echo"

    def twin(self, number: int) -> Path:
        return self.folder / f"twin-{number}"

    @property
    def isolated(self) -> Run:
        """The isolated run, with every module's inputs generated; there is one if something was found."""
        return Run(self.folder / "isolated")

    @property
    def full(self) -> Run:
        """Reference and candidate again, with the tensors that were wrong in sketches recorded in full."""
        return Run(self.folder / "full")

    @property
    def most_detailed(self) -> Run:
        """Where the most is recorded of reference and candidate."""
        return self.full if is_complete(self.full.reference) and is_complete(self.full.candidate) else self

    def twins(self) -> list[Path]:
        """The folders of the twins, by number."""
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
        """Remove what an earlier check reported: if this one fails, no old report may stand for it."""
        for name in (REPORT, PAGE, EXIT_CODE):
            (self.folder / name).unlink(missing_ok=True)

    def copy_references(self, other: Run) -> None:
        """Copy the reference and its twins from another run; they come without marks, so a later run makes its own."""
        for trace in (other.reference, other.echo, *other.twins()):
            if _is_trace(trace):
                shutil.copytree(trace, self.folder / trace.name)

    def archive(self, progress: OnProgress) -> None:
        """Store all other traces as differences to their reference."""
        self._change(lambda path, done: archive(path, self.reference.name, done), progress)

    def restore(self, progress: OnProgress) -> None:
        """Restore archived traces."""
        self._change(restore, progress)

    def num_bytes(self) -> int:
        """Return how many bytes the traces take on the disk."""
        return sum(path.stat().st_size for path in self.folder.rglob("rank-*/*"))

    def _change(self, change: Callable[[Path, Callable[[], None]], None], progress: OnProgress) -> None:
        runs = [run for run in (self, self.full, self.isolated) if _is_trace(run.reference)]
        beside = [path for run in runs for path in (run.candidate, run.repeat, run.echo, *run.twins())]
        # Cells of a sweep link to shared references and twins.
        traces = [path for path in beside if _is_trace(path) and not path.is_symlink()]
        total = sum(1 for path in traces for _ in path.glob("rank-*/chunk-*"))
        counts = itertools.count(1)
        for path in traces:
            try:
                change(path, lambda: progress(next(counts), total))
            except OSError as error:
                raise TTraceError(f"{path} cannot be changed: {error}. It can be read as it was before.") from None

    def check_complete(self) -> None:
        """Refuse a folder without both traces, and say what it has."""
        self._check_links()
        missing = [path.name for path in (self.reference, self.candidate) if not _is_trace(path)]
        if not missing:
            read_document(self.folder / MARK)
            return
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise TTraceError(f"{self.folder} {what}. Give the folder that `ttrace run --out` wrote.")
        if _is_trace(self.folder):
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

    @collect_rarely()
    def judge(
        self,
        strictness: Strictness = AS_USUAL,
        *,
        isolated: bool = True,
        rules: Rules | None = None,
        progress: OnProgress | None = None,
        engine: Engine | None = None,
    ) -> Judgement:
        """Judge the candidate, with its repeat and its isolated run if there are any; no command runs.

        With `rules`, tensors that they match get other layouts than recorded. The isolated run is not used then: the
        inputs of its modules were generated for the recorded layouts.
        """
        self.check_complete()
        engine = engine or use_all_cores()
        detailed = self.most_detailed  # this opens traces
        reference = open_trace(self.reference)
        twins, notes = choose_twins(self.twins(), self.folder)
        rounding = ToleranceModel.measure(reference, twins, strictness.margin, engine=engine, progress=progress)

        def trace(folder: Path) -> Trace:
            return (
                open_trace(folder)
                if rules is None
                else _check_and_return(RelayoutTrace(folder, rules, rounding.reference))
            )

        if is_complete(self.echo):
            echo = open_trace(self.echo)
            check_measured(echo, reference)
            own = Noise.between(reference, echo, rounding, "reference")
            notes, rounding = [*notes, *own.notes(rounding)], own.widen(rounding)
        if detailed is not self:
            reference = open_trace(detailed.reference)
            rounding = replace(rounding, reference=reference)
        candidate = trace(detailed.candidate)
        if rules is not None:
            _check_use(rules, candidate, self.folder)
        check_side(reference, "reference")
        check_side(candidate, "candidate")
        if is_complete(self.repeat):
            again = trace(self.repeat)
            check_side(again, "candidate")
            check_candidate(again, reference)
            check_measured(again, open_trace(self.candidate))
            noise = Noise.between(candidate, again, rounding)
            notes, rounding = [*notes, *noise.notes(rounding)], noise.widen(rounding)
        found = judge_candidate(rounding, candidate, policy=strictness.policy, progress=progress, engine=engine)
        found = replace(found, notes=(*notes, *found.notes))
        if not found.findings or not isolated or rules is not None or not is_complete(self.isolated.candidate):
            return found
        return combine(found, self.isolated.judge(strictness, progress=progress, engine=engine))

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
        """Find out which faults the check of this run, which must be clean, would have revealed."""
        self.check_complete()
        twins, _ = choose_twins(self.twins(), self.folder)
        rounding = ToleranceModel.measure(open_trace(self.reference), twins, margin)
        candidate = open_trace(self.candidate)
        found = judge_candidate(rounding, candidate)
        if found.findings:
            raise TTraceError(
                f"{self.folder} has findings, and a selftest needs a run without any. `ttrace check {self.folder}` "
                "lists them."
            )
        return run_selftest(rounding, candidate, found, progress=progress)

    def next_command(self, judgement: Judgement) -> str:
        """Return the command to type next."""
        folder = shlex.quote(str(self.folder))
        if judgement.findings:
            return f"ttrace diff {folder} {shlex.quote(str(judgement.findings[0].comparison.id))}"
        spoilt = next((comparison for comparison in judgement.comparisons if comparison.spoils), None)
        if spoilt is not None:
            return f"ttrace show {folder} {shlex.quote(str(spoilt.id))}"
        return f"ttrace selftest {folder}" if judgement.exit is Exit.PASSED else f"ttrace show {folder}"


def _check_use(rules: Rules, candidate: Trace, folder: Path) -> None:
    """Refuse rules of which none matches a tensor: the check would be one of the recorded layouts."""
    _ = candidate.shards  # every rule has been tried by now
    unused = rules.list_unused()
    if len(unused) == len(rules.rules):
        names = f"{', '.join(map(str, unused[:3]))} matched nothing" if unused else "there is no rule in them"
        raise TTraceError(
            f"these rules change no layout: {names}. `ttrace show {shlex.quote(str(folder))}` lists the names that a "
            "rule can match."
        )


def open_trace(folder: Place) -> Trace:
    """Open a trace that one launch wrote, the one that was marked as done."""
    return _check_and_return(Trace(folder))


def _check_and_return(trace: Trace) -> Trace:
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


def is_complete(folder: Path) -> bool:
    """Whether every rank left a trace and finished it."""
    return _is_trace(folder) and not any(Trace(folder).gaps())


def _is_trace(folder: Path) -> bool:
    return any(folder.glob(f"rank-*/{MANIFEST}"))
