"""This module holds the words in which a judgement is given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from ttrace.layouts.source import Provenance
from ttrace.tensors.ids import Kind, TensorId
from ttrace.values.stats import Stats


class Verdict(StrEnum):
    """What is said of one logical tensor."""

    PASS = "PASS"
    FAIL = "FAIL"
    CONFLICT = "CONFLICT"
    """Replicas that must agree do not."""
    GAP = "GAP"
    """Elements, or summands of a pending sum, that nobody holds."""
    MISSING = "MISSING"
    """One side, or a rank that owns the module, has no such tensor."""
    UNJUDGED = "UNJUDGED"

    @property
    def is_wrong(self) -> bool:
        return self in (Verdict.FAIL, Verdict.CONFLICT)


class Exit(IntEnum):
    """What a command's exit code says."""

    PASSED = 0
    FOUND = 1
    UNJUDGED = 2


ZERO = "mathematically zero: the twins' own error is as large as the tensor"
LOST = "its gradient is mathematically zero, so rounding alone decides its update"
UNPROVEN = "the twins' own error is as large as the tensor, and nothing proves that it is mathematically zero"
UNDECIDED = "rounding alone seems to decide this update, but nothing proves that its gradient is mathematically zero"
UNSTABLE = "the twins' own error is as large as the tensor: the reference itself is unstable here"
NOT_FINITE = "the reference or one of its twins is not finite"
NO_TWIN = "no twin has this tensor, so that nothing says what rounding explains"
NO_LAYOUT = "no layout"
"""How the reason begins where nobody stated a layout and none can be inferred."""
COMPILED = "inside compiled code that was left as it is: only what enters and leaves it was recorded"
TOGETHER = "the candidate has no gradients of single microbatches here, as FSDP2 has none"
REDUCED_LATER = "what the ranks add in this microbatch sums to the reference's, and all have one final gradient"
PARTIAL_CALL = "a partial sum: a collective inside the module has still to add what the ranks have"
UNTRACED = "the candidate says that it has no moment at which this could be recorded"
STREAMED = "the reference says that it has no moment at which this could be recorded"
PASSED_BY = "the isolated reference ran an identical block in place of this one"
OTHER_DATA = "the two sides were fed different data"
OWN_ROWS = "each data-parallel rank has a value of its own rows here, and what follows from it is judged"
OWN_MICROBATCHES = "forward passes change this buffer, and each rank has run only some of the reference's microbatches"
EXCUSED = frozenset(
    {
        ZERO,
        LOST,
        COMPILED,
        TOGETHER,
        UNTRACED,
        STREAMED,
        PASSED_BY,
        REDUCED_LATER,
        OWN_ROWS,
        OWN_MICROBATCHES,
    }
)
"""The closed set of reasons for which not judging a tensor does not spoil the whole verdict."""


@dataclass(frozen=True)
class Tolerance:
    """The error that rounding can explain: margin x max(error of the twins, floor)."""

    value: float
    twin_error: float
    floor: float
    scale: float = math.inf
    """How far <a, b> / <a, a> may be from 1; infinite where the scale is not judged."""
    size: float = 0.0
    """Errors are relative to elements of this size, where the tensor itself is zero but for rounding; else 0."""
    is_repeated: bool = True
    """Whether a second run of the candidate, where there was one, gave the same."""
    is_proven_zero: bool = False
    """Whether this is a gradient that is proven to be zero but for rounding, or what a step made of one."""

    def error(self, stats: Stats) -> float:
        """How far off this is, relative to the tensor or to the size it is measured by."""
        if not self.size or not (stats.finite_a and stats.finite_b and stats.count):
            return stats.error
        return math.sqrt(stats.dd / stats.count) / self.size


@dataclass(frozen=True)
class Part:
    """One region of the candidate's tensor, measured alone."""

    ranks: tuple[int, ...]
    error: float


@dataclass(frozen=True)
class Comparison:
    """One id, measured."""

    id: TensorId
    verdict: Verdict
    reason: str = ""
    stats: Stats = field(default_factory=Stats)
    tolerance: Tolerance | None = None
    parts: tuple[Part, ...] = ()
    replica_error: float = 0.0
    replica_tolerance: float = 0.0
    """How far the replicas may differ that differ most."""
    layout: str = ""
    by: Provenance | None = None
    suggestion: str = ""
    """The layout that would explain it, where nobody stated one."""
    num_different: int | None = None
    """Of wrong integers, how many differ: their error, relative to their size, says little."""
    is_allowed: bool = False
    """Whether a known and accepted deviation excuses it."""

    @property
    def has_inferred_layout(self) -> bool:
        """Whether its layout, or a part of it, was inferred from shapes."""
        return self.by is not None and self.by.source.is_inferred

    @property
    def error(self) -> float:
        return self.stats.error if self.tolerance is None else self.tolerance.error(self.stats)

    @property
    def scale_error(self) -> float:
        """How far the candidate as a whole is from 1 x the reference; 0 where both are zero."""
        return abs(self.stats.scale - 1.0) if self.stats.aa else 0.0

    @property
    def excess(self) -> float:
        """How many times the tolerance the error, or that of the scale, is; the replicas' disagreement counts too."""
        if self.tolerance is None:
            return math.nan
        worst = max(self.error, self.replica_error)
        if self.tolerance.value == 0.0:
            return math.inf if worst > 0.0 else 0.0
        return max(worst / self.tolerance.value, self.scale_error / self.tolerance.scale)

    @property
    def spoils(self) -> bool:
        """Whether this comparison keeps the whole from being judged."""
        if self.id.kind is Kind.CALL:
            return False  # what functions inside a module give back is evidence, no part of the contract
        is_excused = self.reason in EXCUSED or self.is_allowed
        return not (self.verdict is Verdict.PASS or self.verdict.is_wrong or is_excused)


UNEXPLAINED = "unexplained"
"""The name of a cause that is not known."""
CONSTANT_FACTOR = "constant factor"
DOUBLE_REDUCTION = "double reduction"
FACTORS = (CONSTANT_FACTOR, DOUBLE_REDUCTION)
"""The causes that are one number by which everything is multiplied, whatever the values are."""
SOME_RANKS = "some ranks"


@dataclass(frozen=True)
class Cause:
    """Why it probably is wrong: a short sentence, the axis if there is one, and the numbers behind it."""

    name: str
    sentence: str
    axis: str | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Where something starts to be wrong, the evidence, the likely cause."""

    comparison: Comparison
    module: str
    source: str
    cause: Cause
    num_after: int
    """How many wrong tensors follow from here on, in the reference's order."""
    inside: str = ""
    """The first wrong call of a torch function in the module's own code, where that was looked for."""
    alone: bool | None = None
    """Whether the module is wrong by itself, on generated inputs; None if the isolated run did not judge its tensor."""
    covers: frozenset[TensorId] = frozenset()
    """Further tensors that are wrong for the same cause, and have no findings of their own."""


@dataclass(frozen=True)
class Judgement:
    """Everything a check found."""

    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    """What keeps the whole from being judged, beyond single tensors."""
    notes: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        if self.findings:
            return Exit.FOUND
        if self.problems or not self.count(Verdict.PASS):
            return Exit.UNJUDGED
        # What is wrong is told by a finding; without one it is not understood, which is no success either.
        open_ends = any(comparison.spoils or comparison.verdict.is_wrong for comparison in self.comparisons)
        return Exit.UNJUDGED if open_ends else Exit.PASSED

    def count(self, verdict: Verdict) -> int:
        return sum(comparison.verdict is verdict for comparison in self.comparisons)
