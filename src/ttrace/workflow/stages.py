"""Stage of a run: one command under one plan makes one trace.

A stage that succeeded leaves a mark beside its trace. `Flow` does not run it again as long as the command, the plan,
the files it was loaded from, the environment variables and the reference it was made for are the same.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict

from ttrace.capture.environment import read_environment
from ttrace.capture.plan import Plan, claim_of
from ttrace.errors import TraceError, TTraceError
from ttrace.trace.format import MANIFEST, rank_folder
from ttrace.trace.reader import Trace
from ttrace.trace.seal import find_changed_file, fingerprint_file, open_document, seal_document
from ttrace.trace.store import Place, Remote
from ttrace.untrusted import check_inside, read_text, replace_file
from ttrace.workflow.launch import Launches, LaunchResult, describe_commit, launch


class PlanChanges(TypedDict, total=False):
    """The fields of a plan in which stages differ."""

    out: Path
    role: Literal["reference", "echo", "twin", "candidate"]
    reference: Path
    repeats: Path
    launch: str
    twin: int
    num_steps: int
    first_step: int
    parameters: Literal["own"]
    isolated: bool
    inside: tuple[str, ...]
    grad_factor: float
    only: tuple[str, ...]
    full: tuple[str, ...]
    stop: bool
    then: tuple[Plan, ...]


def change(plan: Plan, **changes: Unpack[PlanChanges]) -> Plan:
    """Copy a plan with other values of these fields; `model_copy` itself would accept any name."""
    return plan.model_copy(update=changes)


class _Mark(BaseModel):
    """What the trace of a successful stage was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: str
    """A different one for each trace."""
    launch: str
    """The launch that wrote the trace."""
    of: str
    """The stamp of its reference."""
    command: tuple[str, ...]
    plan: Plan
    environment: dict[str, str]
    sources: dict[str, str]
    time: str = ""
    """When the trace was made, in UTC."""
    git: str = ""
    """The commit that was checked out, with a plus if files differed from it."""


@dataclass(frozen=True)
class Stage:
    """One command under one plan."""

    command: tuple[str, ...]
    plan: Plan

    @property
    def trace(self) -> Trace:
        return Trace(self.plan.written)

    def is_done(self) -> bool:
        """Whether an earlier trace is what this stage would make now."""
        mark = _read_mark(self.plan.out)
        if mark is None or (mark.command, mark.plan) != (self.command, self._plan):
            return False
        return (mark.of, mark.environment) == (self._reference_stamp, read_environment()) and find_changed_file(
            mark.sources
        ) is None

    def run(self, *, timeout: float, then: Sequence[Stage] = (), launches: Launches | None = None) -> Trace:
        """Make the trace, and check that it is complete. An earlier one in the same place is removed.

        `then` are stages that the same process is asked to continue with: those that it completed are there
        afterwards, but not marked as done yet.
        """
        try:
            return self._run(timeout, then, launches)
        except OSError as error:
            raise TTraceError(
                f"{shlex.join(self.command)} cannot be traced: {error}. Is the disk of {self.plan.out} full or "
                "read-only, or are too many files open?"
            ) from None

    def _run(self, timeout: float, then: Sequence[Stage], launches: Launches | None) -> Trace:
        number = uuid.uuid4().hex
        for stage in (self, *then):
            stage.claim(number)
        following = tuple(change(stage._plan, launch=number) for stage in then)
        plan = change(self.plan, then=following, launch=number)
        launched = launch(self.command, plan, timeout=timeout, launches=launches)
        words = shlex.join(self.command)
        is_excused = then and self.is_complete()  # it failed only in a stage that follows
        if launched.status != 0 and not is_excused:
            raise TTraceError(
                f"{words} ended with status {launched.status}:\n{launched.find_error()}\n(from {launched.log})"
                f"{launched.suggest_launcher()}"
            )
        if not has_trace(self.plan.written):
            raise TTraceError(
                f"{words} succeeded but left no trace: {self._explain_no_trace(launched)} Its output is in "
                f"{launched.log}."
            )
        trace = self.trace
        if trace.launch != number:
            raise TTraceError(f"{self.plan.written} was written by another launch while {words} ran. Run it again.")
        unfinished = [rank for rank in trace.ranks if rank.end is None]
        if unfinished:
            asked = "does every rank run its step inside `with session.step():`, and often enough?"
            raise TTraceError(
                f"{words} succeeded, but its rank {unfinished[0].manifest.rank} never finished the traced steps: "
                f"{launched.unattached or asked} Its output is in {launched.log}."
            )
        if not any(trace.problems()):  # otherwise the next run shall make it again
            self.mark()
        return trace

    def _explain_no_trace(self, launched: LaunchResult) -> str:
        if self.plan.attach == "script":
            return "does the script call ttrace.attach(model, optimizer)?"
        if launched.unattached is None or _is_isolated(self.command):
            return (
                "no process of it could be watched. `python -S`, `-I` and `-E` prevent that, and so does a launcher "
                "that clears PYTHONPATH. Leave that out, or call ttrace.attach(model, optimizer) in the script."
            )
        return launched.unattached or "no process of it trained a model with an optimizer of torch."

    def is_complete(self) -> bool:
        """Whether every rank finished."""
        if not has_trace(self.plan.written):
            return False
        try:
            check_launch(trace := self.trace)
            return not any(trace.gaps())
        except TraceError:
            return False  # damaged, or of another format or launch: a new trace will be neither

    def mark(self) -> None:
        """Write the mark: the trace is what this stage makes."""
        trace = self.trace
        words = {word: found for word in self.command if (found := fingerprint_file(Path(word)))}
        mark = _Mark(
            stamp=uuid.uuid4().hex,
            launch=trace.launch,
            of=self._reference_stamp,
            command=self.command,
            plan=self._plan,
            environment=read_environment(),
            sources={**words, **_collect_sources(trace)},
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            git=_git_state(Path.cwd()),
        )
        replace_file(_mark_of(self.plan.out), seal_document(mark.model_dump_json(indent=1)))

    def claim(self, launch: str) -> None:
        """Claim the place of the trace for a launch: an earlier trace is removed, and its launch may write no more."""
        plan = self.plan
        if plan.reference is not None and plan.reference.resolve() == plan.out.resolve():
            raise TTraceError(f"{plan.out} holds the reference. Choose another --out.")
        claim = claim_of(plan.out)
        claim.parent.mkdir(parents=True, exist_ok=True)
        check_inside(plan.out, plan.out.parent)
        replace_file(claim, launch, is_synced=True)
        self.clear()

    def clear(self) -> None:
        """Remove an earlier trace and its mark, so that every rank's part will be of this plan."""
        plan = self.plan
        _mark_of(plan.out).unlink(missing_ok=True)
        if isinstance(plan.written, Remote):
            (plan.written / rank_folder(0) / MANIFEST).unlink()  # without it there is no trace
        for manifest in plan.out.glob(f"rank-*/{MANIFEST}"):
            shutil.rmtree(manifest.parent)
        if plan.out.is_dir() and not any(plan.out.iterdir()):
            with suppress(OSError):  # another file system may be mounted there
                plan.out.rmdir()

    @property
    def _plan(self) -> Plan:
        """The plan with an absolute path, so that it means the same wherever it is read."""
        return change(self.plan, out=self.plan.out.resolve())

    @property
    def _reference_stamp(self) -> str:
        mark = _read_mark(self.plan.reference) if self.plan.reference else None
        return mark.stamp if mark else ""


def _is_isolated(command: Sequence[str]) -> bool:
    """Whether the command starts a Python that ignores PYTHONPATH or sitecustomize."""
    return any(
        Path(before).name.startswith("python") and re.fullmatch(r"-[a-zA-Z]*[SIE][a-zA-Z]*", word)
        for before, word in itertools.pairwise(command)
    )


@cache
def _git_state(folder: Path) -> str:
    """Asked once per process: a run marks several traces, and git takes long in a large repository."""
    return describe_commit(folder)


def _collect_sources(trace: Trace) -> dict[str, str]:
    """Collect the files that any rank loaded: the last stage of a pipeline may import files that no other does."""
    sources: dict[str, str] = {}
    for rank in trace.ranks:
        for path, mark in rank.end.sources.items() if rank.end else ():
            # A file that differs between two hosts never counts as unchanged.
            sources[path] = mark if sources.get(path, mark) == mark else "?"
    return sources


def has_trace(place: Place) -> bool:
    """Whether a rank began a trace there; in a store, rank 0 did: objects are requested by name."""
    if isinstance(place, Path):
        return any(place.glob(f"rank-*/{MANIFEST}"))
    return (place / rank_folder(0) / MANIFEST).exists()


def check_launch(trace: Trace) -> None:
    """Refuse a trace that is not the one that was marked as done."""
    if isinstance(trace.folder, Remote):
        return
    out = trace.folder.resolve()  # cells of a sweep link to shared references
    mark = _read_mark(out)
    if mark is not None and mark.launch != trace.launch:
        raise TraceError(
            f"{trace.folder} was replaced by another launch than the one in {_mark_of(out)}. Trace again: "
            "`ttrace run --fresh`."
        )


def _mark_of(out: Path) -> Path:
    return out.parent / f"{out.name}.done.json"


def _read_mark(out: Path) -> _Mark | None:
    try:
        text = read_text(_mark_of(out))
        return _Mark.model_validate_json(open_document(text, str(_mark_of(out))))
    except (OSError, ValueError, RecursionError, TTraceError):
        return None  # a damaged mark counts as none


_PAUSE = 0.1
"""Seconds between two looks at the disk."""


@contextmanager
def watch_stages(stages: Mapping[str, Path], on_stage: Callable[[str], None]) -> Iterator[None]:
    """Call `on_stage` with the name of each stage of a launch as soon as its first rank begins its trace, in order.

    The launched process continues from one stage to the next by itself, so its traces are watched.
    """
    if not stages:
        yield
        return
    is_over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(stages, on_stage, is_over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _watch(stages: Mapping[str, Path], on_stage: Callable[[str], None], is_over: threading.Event) -> None:
    for name, out in stages.items():
        while not (out / rank_folder(0) / MANIFEST).exists():
            if is_over.wait(_PAUSE):
                return
        on_stage(name)
