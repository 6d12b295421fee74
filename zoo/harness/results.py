"""Results of the cells of the matrix, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ttrace.judge.reason import describe
from ttrace.judge.verdict import Exit, Judgement, Verdict

_HEAD = """# The matrix of parallelisms

One small transformer is trained for a step with every layout below in every setting, and compared with the same model
in one process. `python -m pytest -m matrix --all` writes this page; CPU, gloo.

- *clean*: nothing is wrong, and everything was judged except what the last column names.
- *fault*: what was broken on purpose, where, and where the first finding is.
- *neutral*: two steps with recording give the same parameters and gradients as without, bit for bit, on every rank.

| cell | clean | fault | found at | neutral | tensors | passed | inferred | not judged |
|---|---|---|---|---|--:|--:|--:|---|
"""


@dataclass(frozen=True)
class Outcome:
    """What is kept of a judgement."""

    exit: Exit
    trouble: tuple[str, ...]
    first: str
    """The module of the first finding."""
    num_tensors: int
    num_passed: int
    num_inferred: int
    unjudged: Mapping[str, int]
    """Why tensors were not judged, and how many."""
    communication: tuple[str, ...] = ()
    """What was noted of its collectives."""

    @classmethod
    def of(cls, judgement: Judgement) -> Outcome:
        comparisons = judgement.comparisons
        wrong = [c for c in comparisons if c.verdict.is_wrong or c.spoils]
        trouble = (*judgement.problems, *(f"{c.id} {c.verdict} {describe(c.why)} {c.excess:.2g}" for c in wrong))
        return cls(
            judgement.exit,
            trouble[:8],
            judgement.findings[0].module if judgement.findings else "",
            len(comparisons),
            judgement.count(Verdict.PASS),
            sum(c.has_inferred_layout for c in comparisons),
            Counter(describe(c.why) for c in comparisons if c.verdict is Verdict.UNJUDGED),
        )


@dataclass
class Result:
    """One cell: clean, with a fault, and with recording off and on."""

    fault: str
    module: str
    """Where the fault was put."""
    changed: list[str] = field(default_factory=list)
    """Parameters and gradients that differ with recording on, on any rank."""
    clean: Outcome | None = None
    broken: Outcome | None = None


def table(results: Mapping[str, Result]) -> str:
    """All results as Markdown, one row a cell."""
    return _HEAD + "".join(f"{_row(name, result)}\n" for name, result in results.items())


def _row(name: str, result: Result) -> str:
    assert result.clean is not None
    assert result.broken is not None
    clean, broken = result.clean, result.broken
    is_found = broken.first == result.module
    cells = (
        name,
        "yes" if clean.exit is Exit.PASSED else f"**no**: {'; '.join(clean.trouble[:2])}",
        f"{result.fault} in {result.module}",
        "there" if is_found else f"**{broken.first or 'nowhere'}**",
        "yes" if not result.changed else f"**no**: {result.changed[0]}",
        str(clean.num_tensors),
        str(clean.num_passed),
        str(clean.num_inferred),
        "; ".join(f"{count}: {reason}" for reason, count in clean.unjudged.items()) or "-",
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
