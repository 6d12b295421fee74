"""This module recognises wrong tensors by what their values are: another tensor's, the right ones in the wrong place,
some rows only, or too few bits.

Like the tests of judge/diagnose.py, each is a function from the evidence to a cause or None.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import torch

from ttrace.judge.evidence import FAR, NEAR, Evidence
from ttrace.judge.logical import Logical, measured
from ttrace.judge.tolerance import unit
from ttrace.judge.verdict import Cause, Verdict
from ttrace.tensors.ids import Kind, Site, TensorId
from ttrace.tensors.ranges import Ranges

_MOST = 1 << 24
"""Larger tensors are not put together to look for patterns in them."""


def other_tensors(e: Evidence) -> Cause | None:
    """The values of another microbatch, step or layer."""
    if e.comparison.verdict is not Verdict.FAIL or e.stats.count < 4:
        return None
    wrong = e.wrong_pieces()
    for other_id, words in _relatives(e):
        other = Logical.found(e.reference_trace, other_id)
        if other is None or other.shape != e.reference.shape:
            continue
        error = measured(other, wrong, factor=e.factor)[0].error
        if error <= min(NEAR * e.tolerance, FAR * e.stats.error):
            return Cause(
                "another's values",
                f"the candidate holds the reference's values of {words}",
                evidence=(f"against {other_id} the error is {error:.1e}",),
            )
    return None


def _relatives(e: Evidence) -> Iterator[tuple[TensorId, str]]:
    """The ids whose values may have been taken for this one's, nearest first."""
    own = e.comparison.id
    for other in e.reference_trace.shards:
        if other.kind is not own.kind or other == own or other.site.slot != own.site.slot:
            continue
        if other.site == own.site:
            if other.step == own.step and other.call == own.call:
                yield other, f"microbatch {other.microbatch}"
            elif other.microbatch == own.microbatch and other.call == own.call:
                yield other, f"step {other.step}"
            elif other.step == own.step and other.microbatch == own.microbatch:
                yield other, f"call {other.call}"
        elif _is_neighbour(other.site, own.site) and (other.step, other.microbatch) == (own.step, own.microbatch):
            yield other, f"{other.name}"


def _is_neighbour(a: Site, b: Site) -> bool:
    """Whether two names differ in their numbers only: the same module of another layer, or another expert."""
    return re.sub(r"\d+", "#", a.name) == re.sub(r"\d+", "#", b.name)


def moved(e: Evidence) -> Cause | None:
    """The right values in the wrong order along one dim: shifted, swapped, or repeated."""
    pair = _both(e)
    if pair is None:
        return None
    ours, theirs = pair
    for dim, size in enumerate(ours.shape):
        if size < 2:
            continue
        source = _matched(ours.movedim(dim, 0), theirs.movedim(dim, 0))
        rest = _relative(ours.index_select(dim, source), theirs)
        away = (source != torch.arange(size)).nonzero().flatten()
        if len(away) and e.is_explained_error(rest):
            return Cause(
                "moved",
                f"the right values in the wrong place along dim {dim}: {_movement(source, away)}",
                evidence=(f"put back, the error is {rest:.1e}",),
            )
    return None


def _matched(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """For every row of the candidate, the row of the reference that is most like it."""
    a, b = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    if a.shape[1] > 64:
        directions = torch.randn(a.shape[1], 64, dtype=a.dtype, generator=torch.Generator().manual_seed(0))
        a, b = a @ directions, b @ directions
    nearest = torch.cdist(b, a)
    own = nearest.diagonal()[:, None]
    # Where another row is no better than the own one, it stays: equal rows are no movement.
    better = torch.where(nearest < own * FAR, nearest, math.inf)
    best = better.min(1)
    return torch.where(best.values.isinf(), torch.arange(len(a)), best.indices)


def _movement(source: torch.Tensor, away: torch.Tensor) -> str:
    size = len(source)
    shifts = {int(x) for x in (torch.arange(size) - source)[away] % size}
    if len(shifts) == 1:
        by = shifts.pop()
        by = by - size if by > size // 2 else by
        where = "" if len(away) > size - abs(by) - 1 else f"indices {_spans(away)} "
        return f"{where}shifted by {by}"
    first, last = int(away[0]), int(away[-1])
    return f"indices {_spans(away)} hold those of {_spans(source[first : last + 1])}"


def _spans(indices: torch.Tensor) -> str:
    """Indices as spans, a few of them."""
    spans: list[list[int]] = []
    for index in indices.tolist():
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans[:4]]
    return ", ".join(words) + (", ..." if len(spans) > 4 else "")


def transposed(e: Evidence) -> Cause | None:
    """The right bytes read in the wrong order: a transposed tensor taken for a contiguous one, or the other way."""
    pair = _both(e)
    if pair is None:
        return None
    ours, theirs = pair
    for i, j in itertools.combinations(range(ours.ndim), 2):
        swapped = ours.transpose(i, j)
        reread = swapped.reshape(ours.shape)
        back = ours.reshape(swapped.shape).transpose(i, j)
        for other in (reread, back):
            rest = _relative(other, theirs)
            if other.shape == theirs.shape and e.is_explained_error(rest):
                return Cause(
                    "transposed",
                    f"the right values with dims {i} and {j} read in the wrong order: transposed or not contiguous",
                    evidence=(f"read the other way, the error is {rest:.1e}",),
                )
    return None


def some_rows(e: Evidence) -> Cause | None:
    """A few indices of one dim are wrong, and all others right."""
    pair = _both(e)
    if pair is None:
        return None
    ours, theirs = pair
    for dim, size in enumerate(ours.shape):
        if size < 3:
            continue
        a, d = (t.movedim(dim, 0).reshape(size, -1).square().sum(1) for t in (ours, theirs - ours))
        is_wrong = d > (NEAR * e.tolerance) ** 2 * a.clamp_min(float(a.mean()) * 1e-6)
        wrong = is_wrong.nonzero().flatten()
        rest = math.sqrt(float(d[~is_wrong].sum()) / max(float(a.sum()), 1e-300))
        if 0 < len(wrong) <= size // 3 and rest <= e.tolerance and not _is_whole_shards(e, dim, wrong):
            return Cause(
                "some rows",
                f"only {_count(len(wrong), size)} of dim {dim} wrong: {_spans(wrong)}{_edge(e, dim, wrong)}",
                evidence=(f"without {'it' if len(wrong) == 1 else 'them'} the error is {rest:.1e}",),
            )
    return None


def _is_whole_shards(e: Evidence, dim: int, wrong: torch.Tensor) -> bool:
    """Whether these are all that some ranks hold: then the ranks are the story."""
    held = {piece.region.dims[dim] for piece in e.candidate.pieces if piece.region.flat is None}
    found = set(wrong.tolist())
    inside = [set(ranges_of) for ranges in held if (ranges_of := _indices(ranges)) and set(ranges_of) <= found]
    return len(held) > 1 and set().union(*inside) == found


def _indices(ranges: Ranges) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def _count(wrong: int, size: int) -> str:
    return f"{wrong} of {size} indices {'is' if wrong == 1 else 'are'}"


def _edge(e: Evidence, dim: int, wrong: torch.Tensor) -> str:
    """Whether the wrong indices are the first or last of every shard."""
    held = {piece.region.dims[dim] for piece in e.candidate.pieces if piece.region.flat is None}
    if len(held) < 2:
        return ""
    found = set(wrong.tolist())
    for word, edge in (("first", {ranges[0][0] for ranges in held}), ("last", {ranges[-1][1] - 1 for ranges in held})):
        if found and found <= edge:
            return f", the {word} of {'each shard' if found == edge else 'a shard'}"
    return ""


def weaker_dtype(e: Evidence) -> Cause | None:
    """Values that fit a weaker dtype than the reference's, off by what that dtype rounds away."""
    if e.comparison.verdict is not Verdict.FAIL or e.comparison.id.kind in (Kind.UPDATE, Kind.PARAM):
        return None
    pair = _both(e)
    ours = e.reference.dtype
    if pair is None or not ours.is_floating_point:
        return None
    for weak in (torch.bfloat16, torch.float16):
        if unit(weak) <= unit(ours):
            continue
        fits = bool((pair[1] / e.factor).to(torch.float32).eq((pair[1] / e.factor).to(weak).to(torch.float32)).all())
        if (fits or e.candidate.dtype == weak) and e.stats.error <= 16 * unit(weak):
            name = str(weak).removeprefix("torch.")
            return Cause(
                "weaker dtype",
                f"the candidate computes in {name} where the reference has {str(ours).removeprefix('torch.')}",
                evidence=(
                    f"every value fits {name}, and the error is {e.stats.error / unit(weak):.1g} of its roundings",
                ),
            )
    return None


def _both(e: Evidence) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both logical tensors in float64, the candidate's factor applied; None if they are large, or not both finite."""
    is_fit = e.comparison.verdict is Verdict.FAIL and e.stats.finite_a and e.stats.finite_b
    if not is_fit or not 4 <= e.stats.count <= _MOST or e.stats.aa == 0.0:
        return None
    return e.reference.tensor().to(torch.float64), e.candidate.tensor().to(torch.float64) * e.factor


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if a.shape == b.shape else math.inf
