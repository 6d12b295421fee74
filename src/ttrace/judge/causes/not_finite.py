"""The cause that a candidate is not finite where the reference is."""

from __future__ import annotations

from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.verdict import Cause, CauseName
from ttrace.tensors.region import Region


def not_finite(e: Evidence) -> Cause | None:
    """The candidate is not finite where the reference is, and where first."""
    if e.stats.finite_b or not e.stats.finite_a:
        return None
    return Cause(
        CauseName.NOT_FINITE,
        "the candidate is not finite where the reference is",
        evidence=() if e.candidate.num_buckets else (_not_finite_elements(e),),
    )


def _not_finite_elements(e: Evidence) -> str:
    return f"{e.stats.nan_b} NaN and {e.stats.inf_b} infinite elements{_first_not_finite(e)}"


def _first_not_finite(e: Evidence) -> str:
    for piece in e.candidate.pieces:
        tensor = piece.tensor()
        for here, there in piece.region.overlaps(Region.whole(e.candidate.shape)):
            bad = (~here.of(tensor).isfinite()).nonzero()
            if len(bad):
                index = there.global_index(tuple(bad[0].tolist()))
                return f", the first at {index} on rank {', '.join(map(str, piece.ranks))}"
    return ""
