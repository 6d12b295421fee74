"""Reasons for a verdict, as data: programs read these, and `sentences.py` puts them into words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ttrace.layouts.region import Shape


class Reason(Enum):
    """Why a tensor got its verdict; the value is its name in reports for programs."""

    # Not judged, and excused: these do not spoil the verdict of a run.
    ZERO = "mathematically zero"
    LOST_UPDATE = "update lost in rounding"
    COMPILED = "compiled"
    NO_MICROBATCH_GRADIENTS = "no gradients of microbatches"
    UNTRACED_IN_CANDIDATE = "not recorded by the candidate"
    UNTRACED_IN_REFERENCE = "not recorded by the reference"
    SKIPPED_BLOCK = "skipped block"
    REDUCED_LATER = "reduced later"
    OWN_ROWS = "own rows"
    OWN_MICROBATCHES = "own microbatches"
    MOVED_SAMPLES = "other samples in a microbatch"
    ALLOWED = "allowed"

    # Not judged, and open.
    UNPROVEN_ZERO = "not proven zero"
    UNPROVEN_UPDATE = "update not proven lost"
    UNSTABLE = "unstable reference"
    REFERENCE_NOT_FINITE = "reference not finite"
    NO_TWIN = "no twin"
    NO_LAYOUT = "no layout"
    NO_REFERENCE_LAYOUT = "no layout in the reference"
    UNSTATED_SUM = "unstated pending sum"
    PARTIAL_CALL = "partial sum in a module"
    OTHER_DATA = "other data"
    OTHER_SHAPE = "other shape"
    DIFFERENT_SHAPES = "ranks disagree on the shape"
    OVERLAP = "overlap"

    # Something is not there.
    NO_TENSOR = "no such tensor"
    ONE_SIDE_CLIPS = "one side clips"
    NO_MODULE = "no such module"
    ABSENT_ON_RANK = "absent on a rank"
    NO_FIRST_FORWARD = "no first forward"
    GAP = "gap"
    MISSING_SUMMAND = "missing summand"

    # Judged.
    NOT_FINITE = "not finite"
    REPLICAS_DIFFER = "replicas differ"
    MIS_SCALED = "mis-scaled"
    CHOICES_DIFFER = "choices differ"
    CHOICES_TIED = "choices within rounding of a tie"


EXCUSED = frozenset(
    {
        Reason.ZERO,
        Reason.LOST_UPDATE,
        Reason.COMPILED,
        Reason.NO_MICROBATCH_GRADIENTS,
        Reason.UNTRACED_IN_CANDIDATE,
        Reason.UNTRACED_IN_REFERENCE,
        Reason.SKIPPED_BLOCK,
        Reason.REDUCED_LATER,
        Reason.OWN_ROWS,
        Reason.OWN_MICROBATCHES,
        Reason.MOVED_SAMPLES,
        Reason.ALLOWED,
    }
)
"""The closed set of reasons for which not judging a tensor does not spoil the verdict of the run."""


@dataclass(frozen=True)
class Why:
    """A reason, with the facts that its sentence states; a reason leaves the facts that it does not need empty."""

    reason: Reason
    side: str = ""
    """The side that it is about: reference or candidate."""
    names: tuple[str, ...] = ()
    """Axes, modules, or the site of a rule."""
    shapes: tuple[Shape, ...] = ()
    index: Shape = ()
    count: int = 0
    """Of elements or choices; or the number of a rank."""
    total: int = 0
    value: float = 0.0
    """What was measured,"""
    limit: float = 0.0
    """and what rounding explains."""
    text: str = ""
    """What people wrote: the reason of an allowance."""
