"""Many runs, traced and judged in one launch, and the result of each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from ttrace.judge.findings.isolated import combine
from ttrace.judge.notes import note_communication
from ttrace.judge.verdict import Exit
from ttrace.trace.reader import Trace
from zoo.bug import Case, Judge, Patch
from zoo.fixed import accusers
from zoo.harness.cells import Traced, shared_out
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import judge, measured_twins
from zoo.seen import Seen

NUM_TOGETHER = 16
"""So many runs are traced before they are judged: their traces lie on disk until then."""
TIMEOUT = HANG / 10
"""Seconds for each run of a launch, and five times that for the launch itself."""


class Traceable(Protocol):
    """A case that makes its reference and its candidate in the same launch."""

    def trace(self, out: Path, references: dict[Any, Path], patch: Patch | None, *, is_early: bool) -> Traced: ...


class Sided(Protocol):
    """Something to trace: a case and what is done to its candidate; its text is its name."""

    @property
    def case(self) -> Case: ...

    @property
    def patch(self) -> Patch | None: ...

    @property
    def is_early(self) -> bool: ...


R = TypeVar("R", bound=Sided)


def by_ttrace(traced: Traced) -> Seen:
    """The judge of the score."""
    begin = time.monotonic()
    kept = Seen.of(judge(traced.reference, traced.candidate))
    noted = tuple(note_communication(Trace(traced.candidate)))
    return replace(kept, seconds=time.monotonic() - begin, communication=noted)


def by_everyone(traced: Traced) -> Seen:
    """The judge of the evaluation: it applies fixed rules too."""
    kept = by_ttrace(traced)
    return replace(kept, accusers=accusers(measured_twins(traced.reference).reference, Trace(traced.candidate)))


def by_line(traced: Traced) -> Seen:
    """The judge of the score by line: the launch runs again what it accuses, isolated."""
    return by_ttrace(traced)


class Isolatable(Protocol):
    """A case that can run again, isolated."""

    def isolate(self, out: Path, first: Traced, module: str, patch: Patch | None, *, is_early: bool) -> Traced: ...


def seen(
    runs: Sequence[R], folder: Path, tell: Callable[[str], None] = lambda _: None, *, judge: Judge = by_ttrace
) -> dict[R, Seen]:
    """Return what is found in each run, with one launch for all runs that can share one."""
    launches: dict[tuple[Any, int], list[R]] = {}
    for run in runs:
        launches.setdefault((run.case.launcher, run.case.num_ranks), []).append(run)
    found: dict[R, Seen] = {}
    for number, ((launcher, num_ranks), together) in enumerate(launches.items()):
        tell(f"{len(together)} runs on {num_ranks} ranks")
        found |= dict(zip(together, launcher(num_ranks, together, folder / str(number), judge), strict=True))
    return {run: found[run] for run in runs}


def on_torch(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    """The launcher of everything that needs nothing but what is installed."""
    kept: list[Seen] = on_ranks(num_ranks, trace_all, runs, folder, judge, timeout=TIMEOUT * (5 + len(runs)))[0]
    return kept


def trace_all(runs: Sequence[Sided], folder: Path, judge: Judge, num_together: int = NUM_TOGETHER) -> list[Seen]:
    """On every rank: trace all runs, a few at a time, and judge them."""
    references: dict[Any, Path] = {}
    kept: list[Seen] = []
    for start in range(0, len(runs), num_together):
        took, traced = [], []
        for run in runs[start : start + num_together]:
            begin = time.monotonic()
            traced.append(_traced(run, folder / str(run), references))
            took.append(time.monotonic() - begin)
        outcomes = shared_out(traced, judge)
        if judge is by_line:
            together = zip(runs[start : start + num_together], traced, outcomes, strict=True)
            outcomes = [_locate(run, first, one, folder / f"{run}-isolated") for run, first, one in together]
        kept += [replace(one, seconds=one.seconds + seconds) for one, seconds in zip(outcomes, took, strict=True)]
        if dist.get_rank() == 0:
            for one in traced:
                shutil.rmtree(one.candidate)
    return kept


def _locate(run: Sided, first: Traced, found: Seen, out: Path) -> Seen:
    """On every rank: run again, isolated, and find the first wrong operation of the module that was accused."""
    if found.exit is not Exit.FOUND or not hasattr(run.case, "isolate"):
        return found
    case = cast(Isolatable, run.case)
    traced = case.isolate(out, first, found.module, run.patch, is_early=run.is_early)
    dist.barrier()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        both = combine(judge(first.reference, first.candidate), judge(traced.reference, traced.candidate))
        outcome = [both.findings[0].operation]
        shutil.rmtree(out)
    dist.broadcast_object_list(outcome)
    operation = outcome[0]
    if operation is None:
        return found
    return replace(found, operation=operation.name, line=operation.source, called_at=operation.called_at)


def _traced(run: Sided, out: Path, references: dict[Any, Path]) -> Traced:
    try:
        traced = cast(Traceable, run.case).trace(out, references, run.patch, is_early=run.is_early)
    except Exception as error:
        error.add_note(f"while tracing {run}")
        raise
    dist.barrier()
    return traced


def patched(patch: Patch | None, candidate: Any) -> Any:
    """The patch, done; what is open while the candidate trains."""
    return (patch(candidate) if patch is not None else None) or nullcontext()
