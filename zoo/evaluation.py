"""Measurements for docs/evaluation.md, and the page made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo import controls
from zoo.bug import Tier, bugs, title
from zoo.controls import Clean
from zoo.fixed import FIXED
from zoo.launch import by_everyone
from zoo.lines import read_rows, replace_section
from zoo.naive import NUM_STEPS, PARTED, Cost, measured
from zoo.page import TEXT
from zoo.score import CAUSE, LOCALISED, SECONDS, Line, Score, score
from zoo.watched import list_watched

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
MINUTES = 25
"""The longest time that all bugs may take, and that all controls may take."""
LOADED = 1.5
"""The load per core above which measured seconds are not reliable."""


@dataclass(frozen=True)
class Evaluation:
    """All measurements."""

    score: Score
    clean: Clean
    cost: Cost

    @property
    def passes(self) -> bool:
        is_quick = max(self.score.seconds, self.clean.seconds) < MINUTES * 60
        return self.score.passes and not self.clean.accused and is_quick

    def page(self) -> str:
        facts, clean, lines = self.score.as_json(), self.clean.as_json(), self.score.lines
        page = TEXT.format(
            machine=_machine(),
            summary=_rows(_summary(self)),
            paper=_rows((line.bug.paper, title(line.name), *_result(line)) for line in lines if line.bug.paper),
            entries=_rows(map(_entry, sorted(lines, key=lambda line: line.name))),
            **{key: ", ".join(facts[key]) or "none" for key in ("missed", "elsewhere", "other_cause")},
            controls=clean["controls"],
            tensors=clean["tensors"],
            precisions=_precisions(self.clean),
            accused=len(clean["accused"]),
            accused_sides=len(facts["false_alarms"]),
            sides=len(lines),
            runs=len(lines) + clean["controls"],
            bugs=len(lines),
            paper_bugs=sum(line.bug.paper > 0 for line in lines),
            fixed=_rows(_fixed(self)),
            parted=f"{PARTED:.0%}",
            steps=self.cost.num_steps or f"more than {NUM_STEPS}",
            naive_seconds=f"{self.cost.naive_seconds:.0f}",
            ttrace_seconds=f"{self.cost.ttrace_seconds:.0f}",
            said=self.cost.said,
        )
        return replace_section(page, read_rows())


def evaluated(tell: Callable[[str], None]) -> Evaluation:
    """Measure everything, one after the other; this takes half an hour."""
    cost = measured()
    tell(f"{cost}")
    watched = list_watched()
    found = score([name for name in bugs() if name not in watched], tell, judge=by_everyone)
    return Evaluation(found, controls.run(controls.every(), tell, judge=by_everyone), cost)


def _machine() -> str:
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    words = f", while other work ran (load {load:.1f} a core)" if load > LOADED else ""
    return f"{os.cpu_count()} cores with gloo and torch {torch.__version__.partition('+')[0]}{words}"


def _summary(found: Evaluation) -> list[tuple[str, str, str]]:
    facts, lines = found.score.as_json(), found.score.lines
    num_real = sum(line.bug.tier is Tier.T1 for line in lines)
    return [
        ("bugs", f"{len(lines)}, {num_real} of them in unmodified released packages", "80, 30"),
        ("detected", f"{facts['detected']:.1%}", "100%"),
        ("located in the exact module", f"{facts['localised']:.1%}", f"{LOCALISED:.0%}"),
        ("right cause as the first finding", f"{facts['cause']:.1%}", f"{CAUSE:.0%}"),
        ("clean sides accused", f"{len(facts['false_alarms'])} of {len(lines)}", "0"),
        ("clean controls accused", f"{len(found.clean.accused)} of {len(found.clean.found)}", "0 of 200"),
        ("median bug", f"{found.score.median:.1f} s", f"{SECONDS:.0f} s"),
        ("all bugs and their clean sides", f"{found.score.seconds / 60:.1f} min", f"{MINUTES} min"),
        ("all controls", f"{found.clean.seconds / 60:.1f} min", f"{MINUTES} min"),
    ]


def _precisions(clean: Clean) -> str:
    names = [control.name for control in clean.found]
    num_weak, num_float8 = (sum(word in name for name in names) for word in ("bfloat16", "fp8"))
    return f"{len(names) - num_weak} in float32 and {num_weak} in bfloat16, {num_float8} of them with float8"


def _fixed(found: Evaluation) -> list[tuple[object, ...]]:
    lines = found.score.lines
    of_paper = [line for line in lines if line.bug.paper]
    clean = [*(line.clean for line in lines), *found.clean.found.values()]

    def row(name: str) -> tuple[object, ...]:
        missed = (sum(name not in line.broken.accusers for line in some) for some in (lines, of_paper))
        return name, sum(name in one.accusers for one in clean), *missed

    accused = len(found.clean.accused) + sum(not line.is_clean for line in lines)
    missed = (sum(not line.is_detected for line in some) for some in (lines, of_paper))
    return [*map(row, FIXED), ("**TTrace**", accused, *missed)]


def _entry(line: Line) -> tuple[object, ...]:
    said = f"`{line.broken.module}/{line.broken.kind}`: {line.broken.sentence}" if line.broken.kind else "nothing"
    return *_result(line), _mark(line.is_clean), line.bug.package, said


def _result(line: Line) -> tuple[object, ...]:
    marks = (_mark(is_so) for is_so in (line.is_detected, line.is_localised, line.is_explained))
    flagged = f"{line.broken.num_wrong} of {line.broken.num_tensors}"
    return f"`{line.name}`", line.bug.tier, *marks, f"{line.broken.seconds:.1f}", flagged


def _mark(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def _rows(rows: Iterable[Sequence[object]]) -> str:
    return "".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |\n" for row in rows)
