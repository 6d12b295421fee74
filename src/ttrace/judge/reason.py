"""Reasons for a verdict, as data that programs read, and the sentences that describe them to people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ttrace.layouts.region import Shape


class Reason(Enum):
    """Why a tensor got its verdict; the value is its name in reports for programs."""

    # Not judged, and excused: these do not spoil the verdict of a run.
    ZERO = "mathematically zero"
    NOISE_DOMINATED_UPDATE = "update lost in rounding"
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
    BEHIND_NOISE = "behind noise"

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
    NEGATIVE_VARIANCE = "negative variance"
    OTHER_STATISTICS = "other statistics"
    SETTINGS_DIFFER = "settings differ"
    NOT_HELD = "not in the optimizer"
    NOT_BROADCAST = "not broadcast"
    SAME_SEED = "same seed"
    SHARD_FAN_IN = "fan-in of a shard"
    STALE_GRADIENT = "stale gradient"
    CHOICES_DIFFER = "choices differ"
    CHOICES_TIED = "choices within rounding of a tie"


EXCUSED = frozenset(
    {
        Reason.ZERO,
        Reason.NOISE_DOMINATED_UPDATE,
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


SETTINGS = frozenset({Reason.SETTINGS_DIFFER, Reason.NOT_HELD})
"""Settings of optimizers and modules differ, which the values of one step need not show."""
REPLACED = frozenset({Reason.NOT_BROADCAST, Reason.SAME_SEED, Reason.SHARD_FAN_IN, Reason.STALE_GRADIENT})
"""Something was wrong before the step, and generated values have replaced it."""
HIDDEN = SETTINGS | REPLACED
"""The reasons that a tensor's compared values do not show."""


@dataclass(frozen=True)
class DifferentSetting:
    """A setting of an optimizer or a module that differs between the sides."""

    name: str
    value: str
    """The candidate's value."""
    needed: str
    """The reference's value."""

    def __str__(self) -> str:
        return f"{self.name} {self.value} instead of {self.needed}"


@dataclass(frozen=True)
class Why:
    """A reason, with the facts that its sentence states; a reason leaves the facts that it does not need empty."""

    reason: Reason
    side: str = ""
    """The side that the reason is about: reference or candidate."""
    names: tuple[str, ...] = ()
    """Axes, modules, or the site of a rule."""
    shapes: tuple[Shape, ...] = ()
    index: Shape = ()
    count: int = 0
    """The number of elements or choices; or the number of a rank."""
    total: int = 0
    value: float = 0.0
    """The value that was measured."""
    limit: float = 0.0
    """The value that rounding explains."""
    text: str = ""
    """The text of an allowance, as a user wrote it."""
    settings: tuple[DifferentSetting, ...] = ()


_MOST_NAMES = 4

_SENTENCES: Mapping[Reason, str] = {
    Reason.ZERO: "mathematically zero: the twins' own error is as large as the tensor",
    Reason.NOISE_DOMINATED_UPDATE: "its gradient is mathematically zero, so rounding alone decides its update",
    Reason.COMPILED: "inside compiled code that was left as it is: only its inputs and outputs were recorded",
    Reason.NO_MICROBATCH_GRADIENTS: "the candidate has no gradients of single microbatches here (FSDP2 has none)",
    Reason.UNTRACED_IN_CANDIDATE: "the candidate reported that it cannot record this tensor",
    Reason.UNTRACED_IN_REFERENCE: "the reference reported that it cannot record this tensor",
    Reason.SKIPPED_BLOCK: "the isolated reference ran an identical block in place of this one",
    Reason.REDUCED_LATER: (
        "the ranks' parts of this microbatch sum to the reference, and all ranks have the same final gradient"
    ),
    Reason.OWN_ROWS: "each data-parallel rank computes this from its own rows; downstream tensors are judged instead",
    Reason.OWN_MICROBATCHES: (
        "forward passes change this buffer, and each rank has run only some of the reference's microbatches"
    ),
    Reason.ALLOWED: "allowed until {text}",
    Reason.UNPROVEN_ZERO: (
        "the twins' own error is as large as the tensor, and nothing proves that it is mathematically zero"
    ),
    Reason.UNPROVEN_UPDATE: (
        "rounding alone seems to decide this update, but nothing proves that its gradient is mathematically zero"
    ),
    Reason.UNSTABLE: "the twins' own error is as large as the tensor: the reference itself is unstable here",
    Reason.REFERENCE_NOT_FINITE: "the reference or one of its twins is not finite",
    Reason.NO_TWIN: "no twin has this tensor, so its rounding error is not known",
    Reason.NO_LAYOUT: "no layout: the ranks hold {other_shapes} of {first_shape}; add a rule for this site",
    Reason.NO_REFERENCE_LAYOUT: "the reference's layout is not known",
    Reason.UNSTATED_SUM: (
        "its replicas sum to the reference over {last_name}, and the module around it is right: a pending sum that "
        'no rule states. If it is intended, add the rule "{first_name}": "... +{last_name}"'
    ),
    Reason.PARTIAL_CALL: "a partial sum: a collective inside the module adds the ranks' parts later",
    Reason.OTHER_DATA: "the two sides were fed different data",
    Reason.MOVED_SAMPLES: "the candidate has these samples in different microbatches or on different ranks",
    Reason.OTHER_SHAPE: "the candidate's shape {other_shapes} is not the reference's {first_shape}",
    Reason.DIFFERENT_SHAPES: "in the {side} the ranks state different shapes: {shapes}",
    Reason.OVERLAP: "in the {side} different shards hold the same {count} elements",
    Reason.BEHIND_NOISE: (
        "two runs of the candidate have an error of {value:.1e} in common, and rounding explains {limit:.1e}. It is "
        "within the tolerance only because the runs also differ from each other: make the candidate deterministic"
    ),
    Reason.NO_TENSOR: "the {side} has no such tensor",
    Reason.ONE_SIDE_CLIPS: "only the {side} clips gradients",
    Reason.NO_MODULE: "the {side} has no {few_names}",
    Reason.ABSENT_ON_RANK: "rank {count} owns the module but has no such tensor",
    Reason.NO_FIRST_FORWARD: "no matching first forward pass was recorded",
    Reason.GAP: "in the {side} no rank holds {count} elements, the first at {index}",
    Reason.MISSING_SUMMAND: "in the {side} a summand over {names} is missing",
    Reason.NOT_FINITE: "the candidate is not finite",
    Reason.REPLICAS_DIFFER: "replicas differ by {value:.1e}",
    Reason.MIS_SCALED: (
        "the candidate is {value:.5g} x the reference, rounding explains a factor within {limit:.1e} of 1; its error "
        "does not show it"
    ),
    Reason.NEGATIVE_VARIANCE: "a variance is never negative, but rank {count} has {value:.3g}",
    Reason.OTHER_STATISTICS: (
        "over the ranks, the mean change of this buffer differs from the reference's by {value:.2g} times the latter; "
        "that each rank has its own microbatches explains {limit:.2g}"
    ),
    Reason.SETTINGS_DIFFER: "its values agree, but its settings differ: {settings}",
    Reason.NOT_HELD: "the candidate's optimizer does not hold it, and the reference's does",
    Reason.NOT_BROADCAST: "its initial values, since replaced, differed between the ranks of {few_names}",
    Reason.SAME_SEED: "the initial values of its parts, since replaced, were equal on the ranks of {few_names}",
    Reason.SHARD_FAN_IN: "its initial values, since replaced, spread {value:.2f} x as widely as in the reference",
    Reason.STALE_GRADIENT: "before the step, its gradient was not zero, as it is in the reference",
    Reason.CHOICES_DIFFER: (
        "{count} of {total} choices differ, by up to {value:.1e} in score; rounding explains {limit:.1e}"
    ),
    Reason.CHOICES_TIED: "{count} of {total} choices differ, all within rounding of a tie",
}


def describe(why: Why | None) -> str:
    """Describe a reason in a sentence; empty if there is no reason. No code depends on the text."""
    if why is None:
        return ""
    names, shapes = why.names, [str(shape) for shape in why.shapes]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return _SENTENCES[why.reason].format(
        side=why.side,
        names=", ".join(names),
        few_names=", ".join(names[:_MOST_NAMES]) + more,
        first_name=names[0] if names else "",
        last_name=names[-1] if names else "",
        shapes=", ".join(shapes),
        first_shape=shapes[0] if shapes else "",
        other_shapes=", ".join(shapes[1:]),
        index=why.index,
        count=why.count,
        total=why.total,
        value=why.value,
        limit=why.limit,
        text=why.text,
        settings=", ".join(map(str, why.settings)),
    )
