"""Modules and parameters that only one side has: one sentence in place of one for each missing tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ttrace.judge.reason import Reason, Why
from ttrace.judge.sentences import describe
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import is_inside
from ttrace.trace.reader import Trace


@dataclass(frozen=True)
class Absence:
    """The outermost modules and parameters that one side does not have."""

    side: str
    names: tuple[str, ...]
    num_tensors: int

    @property
    def why(self) -> Why:
        """The reason of each of the tensors."""
        return Why(Reason.NO_MODULE, self.side, self.names)

    def __str__(self) -> str:
        return f"{describe(self.why)}: {self.num_tensors} tensors missing"


def find_absences(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[Absence]:
    """Find what either side lacks as a whole; a single missing tensor has its own reason."""
    ours, theirs = _collect_names(reference), _collect_names(candidate)
    found = []
    for side, lacking in (("candidate", ours - theirs), ("reference", theirs - ours)):
        missing = [c for c in comparisons if c.verdict is Verdict.MISSING and _find_outermost(c.id.name, lacking)]
        names = dict.fromkeys(_find_outermost(c.id.name, lacking) for c in missing)
        if len(missing) > 1:
            found.append(Absence(side, tuple(names), len(missing)))
    return found


def add_absences(comparisons: Sequence[Comparison], found: Sequence[Absence]) -> list[Comparison]:
    """Give each missing tensor the absence that it is part of as its reason."""
    return [replace(c, why=absence.why) if (absence := _find_absence(c, found)) else c for c in comparisons]


def explain_by_absences(findings: tuple[Finding, ...], found: Sequence[Absence]) -> tuple[Finding, ...]:
    """Name missing modules as the cause where a module is wrong for no other known reason."""
    return tuple(_explain_by_absence(finding, found) for finding in findings)


def _explain_by_absence(finding: Finding, found: Sequence[Absence]) -> Finding:
    for absence in found:
        if finding.cause.name is CauseName.UNEXPLAINED and any(
            is_inside(name, finding.module) for name in absence.names
        ):
            return replace(finding, cause=Cause(CauseName.MISSING_MODULES, str(absence)))
    return finding


def _collect_names(trace: Trace) -> frozenset[str]:
    """All that a run consists of, under all of its names."""
    names = {name for rank in trace.ranks for name in (*rank.manifest.modules, *rank.manifest.parameters)}
    return frozenset(names | set(trace.aliases))


def _find_outermost(name: str, lacking: frozenset[str]) -> str:
    """The outermost of what is lacking that this name is part of; empty for none."""
    return next((outer for outer in _list_around(name) if outer in lacking), "")


def _list_around(name: str) -> Iterator[str]:
    """The name and all modules around it, outermost first."""
    words = name.split(".")
    return (".".join(words[:count]) for count in range(1, len(words) + 1))


def _find_absence(comparison: Comparison, found: Sequence[Absence]) -> Absence | None:
    if comparison.verdict is not Verdict.MISSING:
        return None
    around = set(_list_around(comparison.id.name))
    return next((absence for absence in found if around & set(absence.names)), None)
