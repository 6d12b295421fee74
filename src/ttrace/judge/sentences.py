"""Sentences for reasons: the only place that puts a `Why` into words. Nothing branches on what it returns."""

from __future__ import annotations

from collections.abc import Mapping

from ttrace.judge.reason import Reason, Why

_MOST_NAMES = 4

_SENTENCES: Mapping[Reason, str] = {
    Reason.ZERO: "mathematically zero: the twins' own error is as large as the tensor",
    Reason.LOST_UPDATE: "its gradient is mathematically zero, so rounding alone decides its update",
    Reason.COMPILED: "inside compiled code that was left as it is: only what enters and leaves it was recorded",
    Reason.NO_MICROBATCH_GRADIENTS: "the candidate has no gradients of single microbatches here, as FSDP2 has none",
    Reason.UNTRACED_IN_CANDIDATE: "the candidate says that it has no moment at which this could be recorded",
    Reason.UNTRACED_IN_REFERENCE: "the reference says that it has no moment at which this could be recorded",
    Reason.SKIPPED_BLOCK: "the isolated reference ran an identical block in place of this one",
    Reason.REDUCED_LATER: (
        "what the ranks add in this microbatch sums to the reference's, and all have one final gradient"
    ),
    Reason.OWN_ROWS: "each data-parallel rank has a value of its own rows here, and what follows from it is judged",
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
    Reason.NO_TWIN: "no twin has this tensor, so that nothing says what rounding explains",
    Reason.NO_LAYOUT: "no layout: the ranks hold {other_shapes} of {first_shape}; add a rule for this site",
    Reason.NO_REFERENCE_LAYOUT: "the reference's layout is not known",
    Reason.UNSTATED_SUM: (
        "its replicas sum to the reference over {last_name}, and the module around it is right: a pending sum that "
        'nobody stated. If it is meant, add the rule "{first_name}": "... +{last_name}"'
    ),
    Reason.PARTIAL_CALL: "a partial sum: a collective inside the module has still to add what the ranks have",
    Reason.OTHER_DATA: "the two sides were fed different data",
    Reason.MOVED_SAMPLES: "the candidate has these samples in other microbatches or on other ranks",
    Reason.OTHER_SHAPE: "the candidate's shape {other_shapes} is not the reference's {first_shape}",
    Reason.DIFFERENT_SHAPES: "in the {side} the ranks speak of different shapes: {shapes}",
    Reason.OVERLAP: "in the {side} different shards hold the same {count} elements",
    Reason.NO_TENSOR: "the {side} has no such tensor",
    Reason.ONE_SIDE_CLIPS: "only the {side} clips gradients",
    Reason.NO_MODULE: "the {side} has no {few_names}",
    Reason.ABSENT_ON_RANK: "rank {count} owns the module but has no such tensor",
    Reason.NO_FIRST_FORWARD: "there is no first forward to hold this against",
    Reason.GAP: "in the {side} nobody holds {count} elements, the first at {index}",
    Reason.MISSING_SUMMAND: "in the {side} a summand over {names} is missing",
    Reason.NOT_FINITE: "the candidate is not finite",
    Reason.REPLICAS_DIFFER: "replicas differ by {value:.1e}",
    Reason.MIS_SCALED: (
        "the candidate is {value:.5g} x the reference, rounding explains a factor within {limit:.1e} of 1; its error "
        "does not show it"
    ),
    Reason.CHOICES_DIFFER: (
        "{count} of {total} choices differ, by up to {value:.1e} in score; rounding explains {limit:.1e}"
    ),
    Reason.CHOICES_TIED: "{count} of {total} choices differ, all within rounding of a tie",
}


def describe(why: Why | None) -> str:
    """Say a reason in a sentence; nothing where there is no reason."""
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
    )
