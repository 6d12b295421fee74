"""Modules and parameters that only one side has: one sentence for all of their missing tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import is_inside, list_around
from ttrace.trace.reader import Trace


@dataclass(frozen=True)
class Absence:
    """The outermost modules and parameters that one side does not have."""

    side: str
    """The side that lacks them: reference or candidate."""
    names: tuple[str, ...]
    num_tensors: int

    @property
    def why(self) -> Why:
        """The reason why each of the tensors is missing."""
        return Why(Reason.NO_MODULE, self.side, self.names)

    def __str__(self) -> str:
        return f"{describe(self.why)}: {self.num_tensors} tensors missing"


def find_absences(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[Absence]:
    """Find the modules and parameters that either side lacks; a single missing tensor has its own reason."""
    ours, theirs = _collect_names(reference), _collect_names(candidate)
    absences = []
    for side, lacking in (("candidate", ours - theirs), ("reference", theirs - ours)):
        missing = [c for c in comparisons if c.verdict is Verdict.MISSING and _find_outermost(c.id.name, lacking)]
        names = dict.fromkeys(_find_outermost(c.id.name, lacking) for c in missing)
        if len(missing) > 1:
            absences.append(Absence(side, tuple(names), len(missing)))
    return absences


def add_absences(comparisons: Sequence[Comparison], absences: Sequence[Absence]) -> list[Comparison]:
    """Give each missing tensor the absence that it is part of as its reason."""
    return [replace(c, why=absence.why) if (absence := _find_absence(c, absences)) else c for c in comparisons]


def explain_by_absences(findings: tuple[Finding, ...], absences: Sequence[Absence]) -> tuple[Finding, ...]:
    """Name missing modules as the cause of unexplained findings in the modules around them."""
    return tuple(_explain_by_absence(finding, absences) for finding in findings)


def _explain_by_absence(finding: Finding, absences: Sequence[Absence]) -> Finding:
    for absence in absences if finding.cause.name is CauseName.UNEXPLAINED else ():
        if any(is_inside(name, finding.module) for name in absence.names):
            return replace(finding, cause=Cause(CauseName.MISSING_MODULES, str(absence)))
    return finding


def _collect_names(trace: Trace) -> frozenset[str]:
    """Collect all modules and parameters of a run, under all of their names."""
    names = {name for rank in trace.ranks for name in (*rank.manifest.modules, *rank.manifest.parameters)}
    return frozenset(names | set(trace.aliases))


def _find_outermost(name: str, lacking: frozenset[str]) -> str:
    """Return the outermost missing module that this name is part of; empty if there is none."""
    return next((outer for outer in reversed(list_around(name)) if outer in lacking), "")


def _find_absence(comparison: Comparison, absences: Sequence[Absence]) -> Absence | None:
    if comparison.verdict is not Verdict.MISSING:
        return None
    around = set(list_around(comparison.id.name))
    return next((absence for absence in absences if around & set(absence.names)), None)
