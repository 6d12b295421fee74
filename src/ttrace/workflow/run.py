"""This module runs reference, twins and candidate into one folder, and judges that folder."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.judge.check import Progress, check
from ttrace.judge.tolerance import MARGIN
from ttrace.judge.verdict import Judgement
from ttrace.trace.reader import Trace
from ttrace.workflow.launch import Launched, launch
from ttrace.workflow.space import Space

_MARK = "run.json"


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

    def twin(self, number: int) -> Path:
        return self.folder / f"twin-{number}"

    def twins(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("twin-*") if path.is_dir())

    def judged(self, *, margin: float = MARGIN, progress: Progress | None = None) -> Judgement:
        """Check the candidate; runs nothing again."""
        twins = [Trace(path) for path in self.twins()]
        return check(Trace(self.reference), twins, Trace(self.candidate), margin=margin, progress=progress)

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


def run_all(
    run: Run,
    reference: tuple[str, ...],
    candidate: tuple[str, ...],
    settings: Plan,
    *,
    num_twins: int,
    timeout: float,
    stage: Tell,
    say: Tell,
) -> None:
    """Trace reference, twins and candidate. `settings` holds what is common to all of them.

    `stage` is told what runs now, `say` what is worth a line: once the reference is there, the space all will take.
    """
    _prepare(run, {"reference": reference, "candidate": candidate})
    stage("reference")
    _traced(launch(reference, settings.model_copy(update={"out": run.reference}), timeout=timeout), run.reference)
    space = Space.after(run.reference, run.folder, num_twins + 1)
    space.check()
    say(str(space))
    known = settings.model_copy(update={"reference": run.reference.resolve()})
    for number in range(1, num_twins + 1):
        stage(f"twin {number} of {num_twins}")
        plan = known.model_copy(update={"out": run.twin(number), "role": "twin", "twin": number})
        _traced(launch(reference, plan, timeout=timeout), run.twin(number))
    stage("candidate")
    plan = known.model_copy(update={"out": run.candidate, "role": "candidate"})
    _traced(launch(candidate, plan, timeout=timeout), run.candidate)


def _prepare(run: Run, commands: dict[str, tuple[str, ...]]) -> None:
    """Empty the folder of an earlier run; never one that is not ours."""
    if run.folder.is_dir() and any(run.folder.iterdir()) and not (run.folder / _MARK).exists():
        raise TTraceError(f"{run.folder} is not empty and holds no earlier run. Choose another --out.")
    for old in (run.reference, run.candidate, *run.twins()):
        shutil.rmtree(old, ignore_errors=True)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TTraceError(f"{run.folder} cannot be made: {error}. Choose another --out.") from None
    text = json.dumps({role: shlex.join(command) for role, command in commands.items()}, indent=1)
    (run.folder / _MARK).write_text(text)


def _traced(launched: Launched, trace: Path) -> None:
    command = shlex.join(launched.command)
    if launched.status != 0:
        raise TTraceError(
            f"{command} ended with status {launched.status}:\n{launched.complaint()}\n(from {launched.log})"
        )
    if not trace.is_dir():
        raise TTraceError(
            f"{command} ended well but left no trace. Does the script call ttrace.attach(model, optimizer)? Its output "
            f"is in {launched.log}."
        )
    unfinished = [rank for rank in Trace(trace).ranks if rank.end is None]
    if unfinished:
        raise TTraceError(
            f"{command} ended well, but its rank {unfinished[0].manifest.rank} never finished the traced steps. Does "
            f"every rank run its step inside `with session.step():`, and often enough? Its output is in {launched.log}."
        )
