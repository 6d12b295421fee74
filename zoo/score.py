"""The score: which bugs were found, where, why and how fast, and which clean sides were accused."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrace.judge.verdict import CauseName, Exit
from ttrace.workflow.investigation import list_sites
from zoo.bug import Bug, Judge, Run, entries
from zoo.harness.plans import FULL, SKETCH
from zoo.launch import by_ttrace, seen
from zoo.seen import Seen

LOCALISED, CAUSE, CAUSE_OF_SKETCHES = 0.95, 0.9, 0.85
"""The bars: the fraction of bugs located in their exact module, and rightly explained by the first finding."""
NUM_BUCKETS = 256
"""Of the sketches."""
SECONDS = 15.0
"""The longest time that the median bug may take."""


@dataclass(frozen=True)
class Line:
    """One entry, both ways."""

    name: str
    bug: Bug
    broken: Seen
    clean: Seen

    @property
    def is_detected(self) -> bool:
        return self.broken.exit is Exit.FOUND

    @property
    def is_localised(self) -> bool:
        return self.is_detected and self.broken.module == self.bug.expected.module

    @property
    def is_explained(self) -> bool:
        """Whether the expected cause is named; an unexplained one never counts."""
        found, expected = self.broken, self.bug.expected
        is_named = found.cause != CauseName.UNEXPLAINED.value
        return expected.is_met_by(found) and is_named and expected.words in found.sentence

    @property
    def is_clean(self) -> bool:
        return self.clean.exit is Exit.PASSED

    @property
    def trouble(self) -> list[str]:
        """What prevented the right verdict."""
        broken, clean = () if self.is_detected else self.broken.trouble, () if self.is_clean else self.clean.trouble
        return [*broken, *clean]

    def as_json(self) -> dict[str, Any]:
        expected = self.bug.expected
        return {
            "name": self.name,
            "tier": self.bug.tier,
            "topic": self.bug.topic,
            "package": self.bug.package,
            "paper": self.bug.paper or None,
            "detected": self.is_detected,
            "localised": self.is_localised,
            "cause": self.is_explained,
            "clean": self.is_clean,
            "seconds": round(self.broken.seconds, 2),
            "flagged": self.broken.num_wrong,
            "tensors": self.broken.num_tensors,
            "expected": [expected.module, expected.kind, expected.cause, expected.axis],
            "found": [self.broken.module, self.broken.kind, self.broken.cause, self.broken.axis],
            "sentence": self.broken.sentence,
            "trouble": self.trouble,
        }


@dataclass(frozen=True)
class Score:
    """All entries, and how long they took together."""

    lines: Sequence[Line]
    seconds: float

    def share(self, is_so: Callable[[Line], bool]) -> float:
        return sum(map(is_so, self.lines)) / max(len(self.lines), 1)

    @property
    def median(self) -> float:
        return statistics.median(line.broken.seconds for line in self.lines)

    @property
    def passes(self) -> bool:
        return (
            bool(self.lines)
            and self.share(lambda line: line.is_detected) == 1.0
            and self.share(lambda line: line.is_localised) >= LOCALISED
            and self.share(lambda line: line.is_explained) >= CAUSE
            and self.share(lambda line: line.is_clean) == 1.0
            and self.median < SECONDS
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "bugs": len(self.lines),
            "detected": round(self.share(lambda line: line.is_detected), 4),
            "localised": round(self.share(lambda line: line.is_localised), 4),
            "cause": round(self.share(lambda line: line.is_explained), 4),
            "false_alarms": [line.name for line in self.lines if not line.is_clean],
            "missed": [line.name for line in self.lines if not line.is_detected],
            "elsewhere": [line.name for line in self.lines if line.is_detected and not line.is_localised],
            "other_cause": [line.name for line in self.lines if line.is_localised and not line.is_explained],
            "median_seconds": round(self.median, 2),
            "total_seconds": round(self.seconds, 1),
            "passes": self.passes,
            "entries": [line.as_json() for line in self.lines],
        }

    def __str__(self) -> str:
        found = self.as_json()
        rows = "\n".join(map(_row, self.lines))
        kept = {key: found[key] for key in ("missed", "elsewhere", "other_cause", "false_alarms")}
        names = "\n".join(f"{key.replace('_', ' '):12} {', '.join(value) or 'none'}" for key, value in kept.items())
        return (
            f"{rows}\n\n{names}\n{len(self.lines)} bugs: {found['detected']:.0%} detected, {found['localised']:.0%} in "
            f"the exact module, {found['cause']:.0%} with the right cause first; {len(found['false_alarms'])} false "
            f"alarms on their clean sides; median {self.median:.1f} s, {self.seconds:.0f} s together"
        )


def score(names: Iterable[str], tell: Callable[[str], None] = lambda _: None, *, judge: Judge = by_ttrace) -> Score:
    """Run these entries, with the bug and without."""
    chosen = list(names)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = seen(
            [Run(name, is_clean) for name in chosen for is_clean in (False, True)], Path(folder), tell, judge=judge
        )
    lines = [Line(name, entries()[name], found[Run(name, False)], found[Run(name, True)]) for name in chosen]
    return Score(lines, time.monotonic() - begin)


def score_sketches(names: Iterable[str], tell: Callable[[str], None] = lambda _: None) -> tuple[Score, Score]:
    """Run these entries with sketches; what they leave unexplained runs again, its module recorded in full.

    Return the score of sketches alone, and that of both runs, which is what `ttrace run` does.
    """
    with _environment(SKETCH, str(NUM_BUCKETS)):
        first = score(names, tell)
        lines, seconds = list(first.lines), first.seconds
        for number, line in enumerate(lines):
            if line.is_detected and line.broken.cause == CauseName.UNEXPLAINED.value:
                with _environment(FULL, ",".join(list_sites(line.broken.module))):
                    again = score([line.name], tell)
                lines[number], seconds = again.lines[0], seconds + again.seconds
    return first, Score(lines, seconds)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable that ranks inherit."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _row(line: Line) -> str:
    marks = "".join("✓" if mark else "✗" for mark in (line.is_detected, line.is_localised, line.is_explained))
    broken, clean = line.broken, "clean ✓" if line.is_clean else f"clean ✗ {line.clean.sentence or line.clean.trouble}"
    what = f"{broken.module}/{broken.kind}: {broken.sentence}" if broken.kind else " ".join(broken.trouble)
    flagged = f"{broken.num_wrong}/{broken.num_tensors}"
    return f"{line.bug.tier} {marks} {clean}  {line.name:34} {broken.seconds:5.1f} s {flagged:>9}  {what}"
