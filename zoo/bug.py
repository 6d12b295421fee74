"""Entries of the zoo: a bug, reported or typical, in a case that shows it and in one that does not."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import zoo.bugs
from ttrace.compat.torch import RELEASE
from ttrace.judge.verdict import Exit

if TYPE_CHECKING:
    from zoo.harness.cells import Traced
    from zoo.seen import Seen

Patch = Callable[[Any], AbstractContextManager[object] | None]
"""A change to an attached candidate, on every rank; a returned context manager is open while it trains.

It gets what the case trains: a `Candidate`, Megatron's `Training`, or what was `Loaded` from a checkpoint.
"""


class Tier(StrEnum):
    """How real an entry is."""

    T1 = "T1"
    """A released package, unmodified."""
    T2 = "T2"
    """The exact wrong line, put back into a current package."""
    T3 = "T3"
    """An equivalent in plain PyTorch: only a GPU library or an old version has the bug itself."""
    T4 = "T4"
    """A typical mistake, made up and not reported, planted in the small GPT or transformer."""


class Topic(StrEnum):
    """What went wrong."""

    DATA = "wrong data"
    WRONG_COMMUNICATION = "wrong communication"
    MISSING_COMMUNICATION = "missing communication"
    SCALING = "scaling"
    NORM = "gradient norm"
    RANDOM = "rng and initialisation"
    OPTIMIZER = "optimizer step"
    CHECKPOINT = "checkpoint load"
    PORT = "port"
    DRIFT = "drift"
    INFERENCE = "inference"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class Expected:
    """What the first finding must say."""

    module: str
    kind: str
    cause: str
    """A cause that the judge cannot name is "unexplained", and counts as not named."""
    axis: str | None = None
    words: str = ""
    """A part of the sentence."""
    line: str = ""
    """A part of the wrong line of code, or of the call that it is in; empty where nobody stated it,"""
    operation: str = ""
    """and what goes wrong there: a torch function, a collective or an autograd function."""

    def is_met_by(self, found: Seen) -> bool:
        """Return whether the first finding has this module, kind, cause and axis."""
        first = (found.module, found.kind, found.cause, found.axis)
        return found.exit is Exit.FOUND and first == (self.module, self.kind, self.cause, self.axis)


class Case(Protocol):
    """A configuration of a small training. Cases with equal launchers and numbers of ranks share a launch.

    A case that needs its own processes, for example for one version of megatron-core, has its own launcher.
    """

    @property
    def num_ranks(self) -> int: ...

    @property
    def launcher(self) -> Launcher: ...


Judge = Callable[["Traced"], "Seen"]
"""Returns what was observed in a traced run; called on one of the ranks."""
Launcher = Callable[[int, Sequence[Any], Path, Judge], list["Seen"]]
"""Traces and judges runs on so many ranks, into a folder: whatever has a case and a patch, and a name as its text."""


@dataclass(frozen=True)
class Bug:
    """One entry. The clean side is the case without the patch, or `clean_case` and `clean_patch` if they are given."""

    tier: Tier
    topic: Topic
    package: str
    """The package that had the bug; empty if it was not reported."""
    sources: tuple[str, ...]
    """Issue and fix; none if it was not reported."""
    case: Case
    expected: Expected
    patch: Patch | None = None
    is_early: bool = False
    """Whether patches are applied before the session is attached, because the model itself is different."""
    clean_case: Case | None = None
    clean_patch: Patch | None = None
    since: tuple[int, int] = (2, 6)
    until: tuple[int, int] | None = None
    """The first and the last version of torch that has it, of those that were run; None if the newest one has it."""
    paper: int = 0
    """Its number in the table of TTrace's paper; 0 if it is not there."""


@dataclass(frozen=True)
class Run:
    """One side of an entry."""

    name: str
    is_clean: bool

    @property
    def bug(self) -> Bug:
        return entries()[self.name]

    @property
    def case(self) -> Case:
        return (self.bug.clean_case or self.bug.case) if self.is_clean else self.bug.case

    @property
    def patch(self) -> Patch | None:
        return self.bug.clean_patch if self.is_clean else self.bug.patch

    @property
    def is_early(self) -> bool:
        return self.bug.is_early

    def __str__(self) -> str:
        return f"{self.name}{'-clean' if self.is_clean else ''}"


@functools.cache
def bugs(release: tuple[int, int] = RELEASE) -> Mapping[str, Bug]:
    """Return the reported bugs that this torch has, or the one of another release, by name.

    Those of the paper come first, in its order, and of each number the lowest tier first.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(zoo.bugs.__path__))
    known: dict[str, Bug] = {name.replace("_", "-"): _module(name).BUG for name in names}
    here = {name: bug for name, bug in known.items() if bug.since <= release <= (bug.until or release)}
    return dict(
        sorted(here.items(), key=lambda item: (item[1].paper or 99, item[1].tier if item[1].paper else "", item[0]))
    )


@functools.cache
def entries() -> Mapping[str, Bug]:
    """Return all entries by name: the reported bugs, then the typical mistakes."""
    return {**bugs(), **_mistakes()}


def title(name: str) -> str:
    """Return the first line of an entry's description."""
    return story(name).splitlines()[0]


def story(name: str) -> str:
    """Return an entry's description: its docstring or, for a typical mistake, its name in words."""
    if name in _mistakes():
        return f"{name.replace('-', ' ').capitalize()}."
    return str(_module(name.replace("-", "_")).__doc__).strip()


def _mistakes() -> Mapping[str, Bug]:
    found: Mapping[str, Bug] = importlib.import_module("zoo.mistakes").MISTAKES  # it imports this module
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"zoo.bugs.{name}")
