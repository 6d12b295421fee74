"""Causes that the numbers themselves show: not finite, zero, or off by a constant."""

from __future__ import annotations

import torch

from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.causes.registry import FIRST, cause
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import Kind
from ttrace.layouts.region import Region
from ttrace.values.chunks import cut_chunks
from ttrace.values.compare import add_terms

SAME = 1e-3
"""So much, relative to it, a number that was added everywhere may vary: sums are rounded."""


@cause(
    CauseName.NOT_FINITE,
    after=FIRST,
    shown_by="the candidate is not finite where the reference is, and where first",
    fault="overflow",
)
def find_not_finite(e: Evidence) -> Cause | None:
    """Find NaN and infinite elements where the reference is finite."""
    if e.stats.finite_b or not e.stats.finite_a:
        return None
    return Cause(
        CauseName.NOT_FINITE,
        "the candidate is not finite where the reference is",
        evidence=() if e.candidate.num_buckets else (_count_not_finite(e),),
    )


def _count_not_finite(e: Evidence) -> str:
    return f"{e.stats.nan_b} NaN and {e.stats.inf_b} infinite elements{_locate_not_finite(e)}"


def _locate_not_finite(e: Evidence) -> str:
    for piece in e.candidate.pieces:
        for cut in cut_chunks(piece.region.local_shape):
            bad = (~add_terms(piece.terms(), tuple(slice(*run) for run in cut)).isfinite()).nonzero()
            if len(bad):
                first = [start + int(i) for (start, _), i in zip(cut, bad[0], strict=True)]
                index = piece.region.find_index(first)
                return f", the first at {index} on rank {', '.join(map(str, piece.ranks))}"
    return ""


@cause(
    CauseName.ZEROS,
    after="find_updated_twice",
    shown_by="the candidate is zero everywhere",
    fault="gradient detached",
)
def find_zeros(e: Evidence) -> Cause | None:
    """Find a tensor that is zero everywhere, and is not in the reference."""
    # Of replicas that differ, only the first was measured.
    if e.stats.bb != 0.0 or e.stats.aa == 0.0 or e.comparison.verdict is not Verdict.FAIL:
        return None
    return Cause(CauseName.ZEROS, "the candidate is zero everywhere")


@cause(
    CauseName.OFFSET,
    after="find_zeros",
    shown_by="integers that differ from the reference's by one number on each rank, as positions with another start "
    "do; or a parameter or buffer that is the reference's plus one number",
    bug="checkpoint-norms-shifted-twice",
)
def find_offset(e: Evidence) -> Cause | None:
    """Find integers that are the reference's plus one number for each rank: positions with another start."""
    if e.reference.dtype == torch.bool or e.values is None or e.num_buckets:
        return None
    if e.reference.dtype.is_floating_point:
        return _find_added_number(e)
    surplus: dict[int, set[int]] = {}
    counts = dict.fromkeys(range(len(e.candidate.pieces)), 0)
    for block in e.blocks():
        here = Region(e.reference.shape, tuple((run,) for run in block.bounds))
        gaps = (block.theirs - block.ours).round()
        for number, piece in enumerate(e.candidate.pieces):
            for part, _ in here.overlaps(piece.region):
                counts[number] += part.of(gaps).numel()
                surplus.setdefault(number, set()).update(map(int, part.of(gaps).unique().tolist()))
                if len(surplus[number]) > 1:
                    return None
    if any(counts[number] < 2 for number in surplus):
        return None
    shifts: dict[int, set[int]] = {}
    for number, [by] in surplus.items():
        shifts.setdefault(by, set()).update(e.candidate.pieces[number].ranks)
    right = shifts.pop(0, set())
    named = [
        f"{_name_ranks(ranks, alone=not right and len(shifts) == 1)}: reference {by:+d}" for by, ranks in shifts.items()
    ]
    words = ", ".join(named).replace("reference +", "reference + ").replace("reference -", "reference - ")
    return Cause(CauseName.OFFSET, f"integers differ by a constant; {words}")


def _find_added_number(e: Evidence) -> Cause | None:
    """Find a parameter or buffer to which one number was added everywhere."""
    if e.comparison.id.kind not in (Kind.PARAM, Kind.BUFFER) or e.stats.count < 2:
        return None
    gaps = [bound for block in e.blocks() for bound in (block.theirs - block.ours).aminmax()]
    low, high = float(min(gaps)), float(max(gaps))
    if low == 0.0 or abs(high - low) > SAME * abs(low):
        return None
    return Cause(CauseName.OFFSET, f"every value is the reference's {'+' if low > 0 else '-'} {abs(low):.4g}")


def _name_ranks(ranks: set[int], *, alone: bool) -> str:
    return "all ranks" if alone else f"rank {', '.join(map(str, sorted(ranks)))}"


@cause(
    CauseName.COUNT,
    after="find_offset",
    shown_by="an integer that both sides have computed, such as the number of labels in a batch, is another one",
    unproven="no entry has wrong integers; tests/judge/causes/test_numbers.py",
)
def find_count(e: Evidence) -> Cause | None:
    """Find a single integer that is not the reference's."""
    is_count = e.comparison.verdict is Verdict.FAIL and e.stats.count == 1 and not e.reference.dtype.is_floating_point
    if not is_count or e.reference.dtype == torch.bool or e.candidate.num_buckets:
        return None
    ours, theirs = (int(side.tensor().flatten()[0]) for side in (e.reference, e.candidate))
    return Cause(CauseName.COUNT, f"both sides count, and the candidate comes to {theirs}, the reference to {ours}")
