"""What is kept of a judgement: the first finding, and how much was wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ttrace.judge.reason import describe
from ttrace.judge.verdict import Exit, Judgement


@dataclass(frozen=True)
class Seen:
    """The result of one run."""

    exit: Exit
    module: str = ""
    kind: str = ""
    cause: str = ""
    axis: str | None = None
    sentence: str = ""
    num_wrong: int = 0
    num_tensors: int = 0
    trouble: tuple[str, ...] = ()
    """Some of what was wrong or not judged."""
    seconds: float = 0.0
    """Candidate and judgement, with the reference and its twins where no earlier run had the same."""
    operation: str = ""
    """The first wrong operation, if it was looked for,"""
    line: str = ""
    """and its file and line,"""
    called_at: str = ""
    """and, of a custom backward, the line that called its function."""
    communication: tuple[str, ...] = ()
    """What was noted of its collectives."""
    accusers: frozenset[str] = frozenset()
    """The fixed rules that accuse it, if they were applied."""

    @classmethod
    def of(cls, judgement: Judgement) -> Seen:
        wrong = [c for c in judgement.comparisons if c.verdict.is_wrong]
        open_ends = [c for c in judgement.comparisons if c.verdict.is_wrong or c.spoils]
        trouble = (*judgement.problems, *(f"{c.id} {c.verdict} {describe(c.why)} {c.excess:.2g}" for c in open_ends))
        seen = cls(judgement.exit, num_wrong=len(wrong), num_tensors=len(judgement.comparisons), trouble=trouble[:6])
        if not judgement.findings:
            return seen
        first = judgement.findings[0]
        kind = str(first.comparison.id.kind)
        cause = first.cause
        return replace(
            seen, module=first.module, kind=kind, cause=cause.name.value, axis=cause.axis, sentence=cause.sentence
        )
