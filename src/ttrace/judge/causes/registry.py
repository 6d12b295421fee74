"""Registry of causes, and the search for the cause of a wrong tensor.

A cause is a function from the evidence to a `Cause` or None, registered with its name, with what shows it (the docs'
table is made from that), with the fault that proves it, and with the function that it comes after: the first that
finds something wins, so they are in order from the most specific to the least. Every module of this folder is
searched. To add a cause, write such a function, give `CauseName` a member, and add a fault to
tests/support/catalogue.py; `python docs/generate.py` then updates the table and the JSON schema.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter

import ttrace.judge.causes
from ttrace.errors import SketchError
from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.verdict import Cause, CauseName, Comparison
from ttrace.trace.reader import Trace

Detector = Callable[[Evidence], Cause | None]
FIRST = ""
"""What the first function comes after."""


@dataclass(frozen=True)
class RegisteredCause:
    """What is known of a cause before any tensor is wrong for it."""

    name: CauseName
    shown_by: str
    """What the values show, for the docs."""
    fault: str = ""
    """The fault of the tests' catalogue that proves it,"""
    bug: str = ""
    """or else the entry of the zoo,"""
    unproven: str = ""
    """or else why neither does."""
    after: str = FIRST
    detector: Detector | None = None
    """What finds it; None where a finding makes it, and not the values of one tensor."""

    def __post_init__(self) -> None:
        num_proofs = sum(map(bool, (self.fault, self.bug, self.unproven)))
        assert num_proofs == 1, f"{self.name}: state one proof, or why there is none"


_DETECTORS: dict[str, RegisteredCause] = {}


def cause(
    name: CauseName, *, after: str, shown_by: str, fault: str = "", bug: str = "", unproven: str = ""
) -> Callable[[Detector], Detector]:
    """Register the function that finds a cause; `after` is the name of the function that is asked just before it."""

    def register(detector: Detector) -> Detector:
        key = detector.__name__
        assert key not in _DETECTORS, f"two functions are called {key}"
        _DETECTORS[key] = RegisteredCause(name, shown_by, fault, bug, unproven, after, detector)
        return detector

    return register


_FROM_FINDINGS = (
    RegisteredCause(
        CauseName.MIS_SCALED,
        "all tensors of a kind, or one of them, are off by a factor that is smaller than rounding errors",
        unproven="no entry is that small; tests/judge/tolerance/test_scale.py",
    ),
    RegisteredCause(
        CauseName.RECOMPUTE, "recomputation gives other values than the first forward", fault="recomputed otherwise"
    ),
    RegisteredCause(
        CauseName.SKIPPED,
        "the candidate has modules that never ran, and the reference ran them",
        unproven="every entry that leaves out a module also lacks it; tests/judge/findings/test_localize.py",
    ),
    RegisteredCause(CauseName.MISSING_MODULES, "modules or parameters that only one side has", fault="layer lost"),
    RegisteredCause(
        CauseName.UNEXPLAINED, "no known pattern explains the difference", bug="cp-keys-gathered-along-heads"
    ),
)
"""Causes that `findings` names without a function here: they are about several tensors, or about none."""


def find_cause(comparison: Comparison, reference: Trace, candidate: Trace) -> Cause:
    """Find out why a tensor probably is wrong."""
    if comparison.id.kind.is_recompute:
        return Cause(CauseName.RECOMPUTE, "recomputation gives other values than the first forward did")
    evidence = Evidence.of(comparison, reference, candidate)
    if evidence is not None:
        for detector in detectors():
            with suppress(SketchError):  # what needs values says nothing of sketches
                found = detector(evidence)
                if found is not None:
                    return found
        if evidence.is_too_large:
            words = f"patterns are not looked for along a dim of {max(evidence.reference.shape)} indices"
            return Cause(CauseName.UNEXPLAINED, f"too large to diagnose: {words}")
    return Cause(CauseName.UNEXPLAINED, "no known pattern explains the difference")


@cache
def detectors() -> tuple[Detector, ...]:
    """All functions that find a cause, in the order in which they are asked."""
    found = {key: entry.detector for key, entry in _load().items() if entry.detector is not None}
    return tuple(found[key] for key in _sort(_load().items()))


def all_causes() -> tuple[RegisteredCause, ...]:
    """Every registered cause: those that functions find, in their order, and those that findings make."""
    known = _load()
    return (*(known[key] for key in _sort(known.items())), *_FROM_FINDINGS)


@cache
def _load() -> dict[str, RegisteredCause]:
    """Import every module of this folder: each registers what it finds."""
    package = ttrace.judge.causes
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return _DETECTORS


def _sort(entries: Iterable[tuple[str, RegisteredCause]]) -> list[str]:
    """Put each function after the one it names; of several that name the same one, by their own names."""
    before = {key: entry.after for key, entry in sorted(entries)}
    unknown = sorted({after for after in before.values() if after != FIRST} - before.keys())
    assert not unknown, f"no function that finds a cause is called {', '.join(unknown)}"
    return list(TopologicalSorter({key: [after] if after else [] for key, after in before.items()}).static_order())
