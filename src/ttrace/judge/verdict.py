"""Values of a judgement: verdicts, tolerances, comparisons, causes and findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, StrEnum

from ttrace.judge.communication import LedgerEvidence
from ttrace.judge.reason import EXCUSED, Reason, Why
from ttrace.layouts.ids import Phase, TensorId
from ttrace.layouts.placement import Provenance
from ttrace.notebook import make_table
from ttrace.trace.collectives import Collective
from ttrace.values.stats import Stats, measure_rms


class Verdict(StrEnum):
    """The verdict on one logical tensor."""

    PASS = "PASS"
    FAIL = "FAIL"
    CONFLICT = "CONFLICT"
    """Replicas that must agree differ."""
    GAP = "GAP"
    """No rank holds some elements, or a summand of a pending sum."""
    MISSING = "MISSING"
    """One side, or a rank that owns the module, has no such tensor."""
    UNJUDGED = "UNJUDGED"

    @property
    def is_wrong(self) -> bool:
        return self is Verdict.FAIL or self is Verdict.CONFLICT


class Exit(IntEnum):
    """The meaning of a command's exit code."""

    PASSED = 0
    FOUND = 1
    UNJUDGED = 2


class ToleranceRule(Enum):
    """The rules that give a tolerance its terms."""

    TWINS = "twins"
    """The largest error of the twins."""
    POOLED = "pooled"
    """The largest error of the twins over all small tensors of the kind: a few elements alone show little."""
    FLOOR = "floor"
    """One rounding of the weakest dtype that was used so far."""
    SIBLINGS = "siblings"
    """For a gradient that is mathematically zero: its rounding error, relative to its siblings."""
    NORM = "norm"
    """Rounding of the norm of all gradients, by which they are clipped."""
    UPDATE = "update"
    """Single elements of an update that rounding may flip or move."""
    SQUARES = "squares"
    """For an optimizer's state that has squares of a gradient: twice the tolerance of the gradient."""
    NOISE = "noise"
    """The margin times the difference between two runs of one side; it is added to the others."""
    SCALE = "scale"
    """How far the scale may be from 1; it is judged separately."""


@dataclass(frozen=True, slots=True)
class ToleranceTerm:
    """What one rule allows, with its margin."""

    rule: ToleranceRule
    value: float


@dataclass(frozen=True)
class Tolerance:
    """The error that rounding can explain; `tolerance/model.py` has the formula."""

    value: float
    twin_error: float
    floor: float
    scale: float = math.inf
    """How far <a, b> / <a, a> may be from 1; infinite where the scale is not judged."""
    size: float = 0.0
    """The size of its siblings' elements, to which errors are relative, for a gradient that is zero; else 0."""
    is_repeated: bool = True
    """Whether the second runs of reference and candidate, as far as there were any, gave the same values."""
    systematic: float = 0.0
    """The error that two runs of a noisy candidate have in common, if only noise can excuse it; else 0."""
    is_proven_zero: bool = False
    """Whether this is a gradient that is proven to be zero but for rounding, or what a step made of one."""
    terms: tuple[ToleranceTerm, ...] = ()
    """What each rule allows. The value is the largest of them plus the noise; the scale is judged separately."""

    @property
    def decisive(self) -> ToleranceTerm | None:
        """The term that gave the value; None for integers, which must be equal."""
        apart = (ToleranceRule.SCALE, ToleranceRule.NOISE)
        return max((term for term in self.terms if term.rule not in apart), key=lambda term: term.value, default=None)

    @property
    def without_noise(self) -> float:
        """The value without what the noise of the candidate added, which is the last term if there is any."""
        return self.value - sum(term.value for term in self.terms[-1:] if term.rule is ToleranceRule.NOISE)

    def with_term(self, rule: ToleranceRule, value: float) -> Tolerance:
        """Add a term; the caller also sets the value."""
        return replace(self, terms=(*self.terms, ToleranceTerm(rule, value)))

    def error(self, stats: Stats) -> float:
        """The error, relative to the tensor or to `size`."""
        if not self.size or not (stats.finite_a and stats.finite_b and stats.count):
            return stats.error
        return measure_rms(stats.dd, stats.count) / self.size


@dataclass(frozen=True)
class RegionError:
    """One region of the candidate's tensor, measured alone."""

    ranks: tuple[int, ...]
    error: float


@dataclass(frozen=True)
class Comparison:
    """One id, measured."""

    id: TensorId
    verdict: Verdict
    why: Why | None = None
    stats: Stats = field(default_factory=Stats)
    tolerance: Tolerance | None = None
    region_errors: tuple[RegionError, ...] = ()
    replica_error: float = 0.0
    replica_tolerance: float = 0.0
    """How far the two replicas that differ most may differ."""
    layout: str = ""
    by: Provenance | None = None
    suggestion: str = ""
    """The layout that would explain the tensor, if none was stated."""
    num_different: int | None = None
    """For integer tensors that are wrong, the number of elements that differ; None for all others."""

    @property
    def reason(self) -> Reason | None:
        return None if self.why is None else self.why.reason

    @property
    def has_inferred_layout(self) -> bool:
        """Whether its layout, or a part of it, was inferred from shapes."""
        return self.by is not None and self.by.source.is_inferred

    @property
    def error(self) -> float:
        return self.stats.error if self.tolerance is None else self.tolerance.error(self.stats)

    @property
    def detectable_error(self) -> float | None:
        """The check reveals any change of at least this size, relative to the tensor; None if it judged nothing."""
        if self.verdict is not Verdict.PASS or self.tolerance is None:
            return None
        error = self.tolerance.value + self.error
        if self.tolerance.size:  # the tolerance is relative to the siblings' size
            error *= (
                self.tolerance.size * math.sqrt(self.stats.count) / self.stats.norm if self.stats.norm else math.inf
            )
        return error

    @property
    def scale_error(self) -> float:
        """How far the scale is from 1; 0 if the reference is zero."""
        return abs(self.stats.scale - 1.0) if self.stats.aa else 0.0

    @property
    def excess(self) -> float:
        """The error in units of the tolerance: of the tensor, its scale or its replicas, the largest."""
        if self.tolerance is None:
            return math.nan
        worst = max(self.error, self.replica_error)
        if self.tolerance.value == 0.0:
            return math.inf if worst > 0.0 else 0.0
        return max(worst / self.tolerance.value, self.scale_error / self.tolerance.scale)

    @property
    def spoils(self) -> bool:
        """Whether this comparison keeps the whole run from being judged."""
        if self.id.kind.is_of_call:
            return False  # the results of functions inside a module are evidence, and are not judged
        return not (self.verdict is Verdict.PASS or self.verdict.is_wrong or self.reason in EXCUSED)


class CauseName(Enum):
    """The closed set of causes; the value is the name in reports, baselines and the docs.

    Each is found by a detector of `causes/__init__.py`, or listed in `causes/search.py`.
    """

    NOT_FINITE = "not finite"
    NOT_LOADED = "not loaded"
    NOT_UPDATED = "not updated"
    OPTIMIZER_SETTINGS = "optimizer settings"
    MODULE_SETTINGS = "module settings"
    PADDED_VOCABULARY = "padded vocabulary"
    UPDATED_TWICE = "updated twice"
    ZEROS = "zeros"
    OFFSET = "offset"
    COUNT = "count"
    MISSING_ALL_REDUCE = "missing all-reduce"
    MISSING_AVERAGE = "missing average"
    WRONG_GROUP = "wrong group"
    GRADIENT_NORM = "gradient norm"
    CLIP_FACTOR = "clip factor"
    OWN_STATISTICS = "own statistics"
    PARTIAL_SUM = "partial sum"
    CONSTANT_FACTOR = "constant factor"
    DOUBLE_REDUCTION = "double reduction"
    OTHERS_VALUES = "another's values"
    MOVED = "moved"
    TRANSPOSED = "transposed"
    BIAS = "bias"
    MISCOUNTED_PART = "miscounted part"
    SOME_ROWS = "some rows"
    UNEVEN_WEIGHTS = "uneven weights"
    WRONG_LOOKUP = "wrong lookup"
    STALE_INPUT = "stale input"
    MICROBATCHES = "microbatches"
    BACKWARD_LEFT_OUT = "backward left out"
    STEP_COUNT = "step count"
    WEAKER_DTYPE = "weaker dtype"
    FUNCTION = "function"
    ROW_FACTORS = "row factors"
    ATTENTION_SCORES = "attention scores"
    SOME_RANKS = "some ranks"
    TIED_COPIES = "tied copies"
    REPLICAS_DIFFER = "replicas differ"
    MIS_SCALED = "mis-scaled"
    RECOMPUTE = "recompute"
    SKIPPED = "skipped"
    NOT_BROADCAST = "not broadcast"
    SAME_SEED = "same seed"
    SHARD_FAN_IN = "fan-in of a shard"
    STALE_GRADIENTS = "stale gradients"
    MISSING_MODULES = "missing modules"
    UNEXPLAINED = "unexplained"


FACTORS = (CauseName.CONSTANT_FACTOR, CauseName.DOUBLE_REDUCTION)
"""The causes that multiply everything by one number."""
VAGUE = (CauseName.UNEXPLAINED, CauseName.REPLICAS_DIFFER)
"""Causes that explain less than any other."""


@dataclass(frozen=True)
class Cause:
    """The likely cause: its name, a short sentence, the axis if there is one, and the numbers that show it."""

    name: CauseName
    sentence: str
    axis: str | None = None
    evidence: tuple[str, ...] = ()


UNEXAMINED = Cause(CauseName.UNEXPLAINED, "its cause was not looked for, as many findings come before it")
"""The cause of findings after the first thirty."""


@dataclass(frozen=True)
class WrongOperation:
    """The operation that makes something wrong of right inputs: a torch function, or a collective."""

    name: str
    source: str
    """The file and line of the script that called it; of a custom backward, its own line."""
    called_at: str = ""
    """The file and line that called its function in the forward pass, if it is inside a custom autograd function."""
    collective: Collective | None = None
    """The collective, as one rank issued it, if it is one."""
    is_backward: bool = False
    """Whether its backward is wrong."""
    is_left_out: bool = False
    """Whether it is a collective that reduces other gradients, but not this one."""


@dataclass(frozen=True)
class WrongOperations:
    """The operations that an isolated run blames."""

    in_modules: Mapping[tuple[str, Phase], WrongOperation] = field(default_factory=dict)
    """The first wrong one of each module, by module and pass."""
    changes: Mapping[str, WrongOperation] = field(default_factory=dict)
    """By parameter, what the script did to its wrong gradient."""
    left_out: Mapping[str, WrongOperation] = field(default_factory=dict)
    """By parameter, the collective that other gradients go through, and its wrong one does not."""


@dataclass(frozen=True)
class Finding:
    """A tensor where something starts to be wrong, with the likely cause."""

    comparison: Comparison
    module: str
    source: str
    cause: Cause
    num_after: int
    """How many wrong tensors follow from here on, in the reference's order."""
    operation: WrongOperation | None = None
    """The first wrong operation in the module's own code, if that was looked for."""
    alone: bool | None = None
    """Whether the module is wrong by itself, on generated inputs; None if the isolated run did not judge its tensor."""
    ledger: LedgerEvidence | None = None
    """What the ledger of collectives shows about the reduction that the cause names."""
    covers: frozenset[TensorId] = frozenset()
    """Other tensors that are wrong for the same cause and have no findings of their own."""


HiddenDifference = tuple[TensorId, Why]
"""A tensor that stands for a difference between the sides that its compared values do not show."""


class Weakness(Enum):
    """Why the check would not have found a fault in a trained parameter; the value is the name in reports."""

    NO_GRADIENT = "no gradient"
    """Its gradient is zero, or nothing but rounding, or was not judged. Its update may be weight decay."""
    NO_UPDATE = "no update"
    """Its gradient was judged, but its update is zero or was not judged."""
    WIDE_TOLERANCE = "wide tolerance"
    """The tolerance of its gradient is much wider than that of the others."""


class Untested(Enum):
    """What this run could have tested and did not, in the order of reports; the value is the name there."""

    LATER_STEPS = "later steps"
    SCHEDULE = "learning-rate schedule"
    LEARNING_RATE_ZERO = "learning rate zero"
    CLIPPING_NOT_REACHED = "clipping threshold not reached"
    NO_CLIPPING = "no clipping"
    IGNORED_LABELS = "ignored labels"
    MASKS = "masks"
    DROPOUT = "dropout"
    OWN_DATA = "own data"


@dataclass(frozen=True)
class Reach:
    """What a check could have found, and what it could not."""

    error: float | None
    """An error of this size, relative to the gradient, would have been found in every parameter that is not weak; None
    if no gradient would have shown any."""
    weak: Mapping[str, Weakness]
    """The trained parameters in which a fault may pass."""
    untested: tuple[Untested, ...]


@dataclass(frozen=True)
class Judgement:
    """The result of a check."""

    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    """What keeps the whole run from being judged, apart from single tensors."""
    notes: tuple[str, ...] = ()
    operations: WrongOperations = field(default_factory=WrongOperations)
    """For an isolated run, the first wrong operation of each module and pass."""
    reach: Reach | None = None
    """What this check could have found; None for an isolated run."""

    @property
    def exit(self) -> Exit:
        if self.findings:
            return Exit.FOUND
        if self.problems or not self.count(Verdict.PASS):
            return Exit.UNJUDGED
        # A finding explains what is wrong. A wrong tensor without a finding is not understood: no success.
        open_ends = any(comparison.spoils or comparison.verdict.is_wrong for comparison in self.comparisons)
        return Exit.UNJUDGED if open_ends else Exit.PASSED

    def count(self, verdict: Verdict) -> int:
        return sum(comparison.verdict is verdict for comparison in self.comparisons)

    def _repr_html_(self) -> str:
        """Show the verdict and the findings in a notebook."""
        words = {
            Exit.PASSED: "✓ every tensor agrees",
            Exit.FOUND: "✗ something is wrong",
            Exit.UNJUDGED: "? no verdict",
        }
        counts = ", ".join(f"{num} {verdict}" for verdict in Verdict if (num := self.count(verdict)))
        rows = [
            (str(finding.comparison.id), finding.cause.sentence, f"{finding.comparison.excess:.2g}", finding.source)
            for finding in self.findings
        ]
        rows += [("", problem, "", "") for problem in self.problems]
        head = ("wrong tensor", "cause", "error / tolerance", "module")
        return make_table(f"{words[self.exit]} ({counts or 'nothing compared'})", head, rows)
