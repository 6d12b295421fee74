"""Causes that the values show: another tensor's, the right ones in the wrong place, some rows only, or too few bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence
from ttrace.judge.causes.index_names import name_indices
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.factor import factor_to_come
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure
from ttrace.judge.tolerance.estimate import unit
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.tensors.ids import ROOT, Kind, Site, TensorId, drop_numbers, is_inside
from ttrace.tensors.ranges import Ranges

_MOST_ROWS = 4096
"""Every row is held against every other to see whether it moved: for more, that takes gigabytes."""


@cause(
    CauseName.OTHERS_VALUES,
    after="find_constant_factor",
    shown_by="the reference's values of another microbatch, step, call or layer",
    fault="stale activations",
)
def find_others_values(e: Evidence) -> Cause | None:
    """Find the values of another microbatch, step or layer."""
    if e.comparison.verdict is not Verdict.FAIL or e.stats.count < 4:
        return None
    wrong = e.wrong_pieces()
    if not any(bool(piece.tensor().any()) for piece in wrong.pieces):
        return None  # zeros would match any tensor of zeros
    for other_id, words in _list_relatives(e):
        other = LogicalTensor.of(e.reference_trace, other_id)
        if other is None or other.shape != e.reference.shape:
            continue
        error = measure(other, wrong, factor=e.factor)[0].error
        if error <= min(MOST_TOLERANCES * e.tolerance, MOST_OF_ERROR * e.stats.error):
            return Cause(
                CauseName.OTHERS_VALUES,
                f"the candidate holds the reference's values of {words}",
                evidence=(f"against {other_id} the error is {error:.1e}",),
            )
    return None


def _list_relatives(e: Evidence) -> Iterator[tuple[TensorId, str]]:
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


@cause(
    CauseName.OTHERS_VALUES,
    after="find_differing_replicas",
    shown_by="a message that was meant for another layer",
    bug="megatron-batched-p2p",
)
def find_misdirected_message(e: Evidence) -> Cause | None:
    """Find another layer's result in place of an input or an incoming gradient: a misdirected message."""
    own = e.comparison.id
    if own.kind not in (Kind.INPUT, Kind.GRAD_OUTPUT) or e.comparison.verdict is not Verdict.FAIL or e.stats.count < 4:
        return None
    for other_id in e.reference_trace.shards:
        is_sent = other_id.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) and other_id.step == own.step
        if not is_sent or not _is_neighbour(other_id.site, own.site):
            continue
        other = LogicalTensor.of(e.reference_trace, other_id)
        if other is None or other.shape != e.reference.shape:
            continue
        factor = factor_to_come(other_id, e.reference_trace, e.candidate_trace)
        error = measure(other, e.wrong_pieces(), factor=factor)[0].error
        if error <= min(MOST_TOLERANCES * e.tolerance, MOST_OF_ERROR * e.stats.error):
            return Cause(
                CauseName.OTHERS_VALUES,
                f"what arrived is {other_id} of the reference: a message that was meant for another layer",
                evidence=(f"against it the error is {error:.1e}",),
            )
    return None


def _is_neighbour(a: Site, b: Site) -> bool:
    """Whether two names differ in their numbers only: the same module of another layer, or another expert.

    A parameter may have been loaded into another of the same block: then one part of their names differs.
    """
    ours, theirs = a.name.split("."), b.name.split(".")
    num_different = sum(x != y for x, y in zip(ours, theirs, strict=False)) if len(ours) == len(theirs) else len(ours)
    is_sibling = a.kind is Kind.PARAM and num_different == 1
    return is_sibling or drop_numbers(a.name) == drop_numbers(b.name)


@cause(
    CauseName.MOVED,
    after="find_others_values",
    shown_by="the right values in another order along a dim",
    fault="keys for values",
)
def find_moved_values(e: Evidence) -> Cause | None:
    """Find the right values in the wrong order along one dim: shifted, swapped or repeated; some may be zeros."""
    pair = e.tensors
    if pair is None:
        return None
    ours, theirs = pair
    for dim, size in enumerate(ours.shape):
        if not 2 <= size <= _MOST_ROWS:
            continue
        source = _match_rows(ours.movedim(dim, 0), theirs.movedim(dim, 0))
        empty = (~theirs.movedim(dim, 0).reshape(size, -1).any(1)).nonzero().flatten()
        found = ours.index_select(dim, source).index_fill(dim, empty, 0.0)
        rest = _measure_relative(found, theirs)
        away = (source != torch.arange(size, device="cpu")).nonzero().flatten()
        if len(away) and e.is_explained_error(rest) and not _is_chance(e, source, away):
            lost = f"; zeros at {name_indices(e, dim, empty)}" if len(empty) else ""
            movement = _describe_movement(e, dim, source, away)
            return Cause(
                CauseName.MOVED,
                f"the right values in the wrong place along dim {dim}: {movement}{lost}",
                evidence=(f"put back, the error is {rest:.1e}",),
            )
    return None


def _match_rows(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """For every row of the candidate, the row of the reference that is most like it."""
    a, b = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    if a.shape[1] > 64:
        generator = torch.Generator("cpu").manual_seed(0)
        directions = torch.randn(a.shape[1], 64, dtype=a.dtype, device="cpu", generator=generator)
        a, b = a @ directions, b @ directions
    nearest = torch.cdist(b, a)
    own = nearest.diagonal()[:, None]
    # Where another row is no better than the own one, it stays: equal rows are no movement.
    better = torch.where(nearest < own * MOST_OF_ERROR, nearest, math.inf)
    best = better.min(1)
    return torch.where(best.values.isinf(), torch.arange(len(a), device="cpu"), best.indices)


def _is_chance(e: Evidence, source: torch.Tensor, away: torch.Tensor) -> bool:
    """Whether any tensor would be matched as well: with short rows and a loose tolerance, something is always near.

    Each run of neighbours that moved together is one choice among all rows, and makes all their numbers match.
    """
    size, width = len(source), e.stats.count // len(source)
    shifts = (source - torch.arange(size, device="cpu"))[away]
    num_choices = 1 + int((shifts.diff() != 0).sum())
    radius = min(MOST_TOLERANCES * e.tolerance, MOST_OF_ERROR * e.stats.error)
    return num_choices * math.log(size) + len(away) * width * math.log(max(radius, 1e-300)) > math.log(1e-3)


def _describe_movement(e: Evidence, dim: int, source: torch.Tensor, away: torch.Tensor) -> str:
    size = len(source)
    shifts = set(((torch.arange(size, device="cpu") - source) % size).tolist())
    if len(shifts) == 1:
        by = shifts.pop()
        return f"shifted by {by - size if by > size // 2 else by}"
    held, taken = name_indices(e, dim, away), name_indices(e, dim, source[away])
    return f"indices {held} hold those of {taken}"


@cause(
    CauseName.TRANSPOSED,
    after="find_moved_values",
    shown_by="the right values with two dims read in the wrong order",
    fault="read transposed",
)
def find_transposed_values(e: Evidence) -> Cause | None:
    """Find the right bytes read in the wrong order: a transposed tensor read as a contiguous one, or vice versa."""
    pair = e.tensors
    if pair is None:
        return None
    ours, theirs = pair
    for i, j in itertools.combinations(range(ours.ndim), 2):
        swapped = ours.transpose(i, j)
        reread = swapped.reshape(ours.shape)
        back = ours.reshape(swapped.shape).transpose(i, j)
        for other in (reread, back):
            rest = _measure_relative(other, theirs)
            if other.shape == theirs.shape and e.is_explained_error(rest):
                return Cause(
                    CauseName.TRANSPOSED,
                    f"the right values with dims {i} and {j} read in the wrong order: transposed or not contiguous",
                    evidence=(f"read the other way, the error is {rest:.1e}",),
                )
    return None


@cause(
    CauseName.SOME_ROWS,
    after="find_bias",
    shown_by="only some indices of a dim are wrong",
    fault="first rows lost",
)
def find_wrong_rows(e: Evidence) -> Cause | None:
    """Find a few wrong indices of one dim, if all others are right."""
    pair = e.tensors
    if pair is None:
        return None
    ours, theirs = pair
    for dim, size in enumerate(ours.shape):
        if size < 3:
            continue
        a, d = (t.movedim(dim, 0).reshape(size, -1).square().sum(1) for t in (ours, theirs - ours))
        # A row that is small beside the others has the others' rounding errors.
        is_wrong = d > (MOST_TOLERANCES * e.tolerance) ** 2 * a.clamp_min(float(a.mean()))
        wrong = is_wrong.nonzero().flatten()
        rest = math.sqrt(float(d[~is_wrong].sum()) / max(float(a.sum()), 1e-300))
        is_rest_right = rest <= min(e.tolerance, MOST_OF_ERROR * e.stats.error)
        if 0 < len(wrong) <= size // 3 and is_rest_right and not _is_whole_shards(e, dim, wrong):
            which = f"{name_indices(e, dim, wrong)}{_describe_edge(e, dim, wrong)}"
            return Cause(
                CauseName.SOME_ROWS,
                f"only {_describe_count(len(wrong), size, dim)} wrong: {which}",
                evidence=(f"without {'it' if len(wrong) == 1 else 'them'} the error is {rest:.1e}",),
            )
    return None


def _is_whole_shards(e: Evidence, dim: int, wrong: torch.Tensor) -> bool:
    """Whether these are all that some ranks hold: then the ranks are the story."""
    held = {piece.region.dims[dim] for piece in e.candidate.pieces if piece.region.flat is None}
    found = set(wrong.tolist())
    inside = [set(ranges_of) for ranges in held if (ranges_of := _list_indices(ranges)) and set(ranges_of) <= found]
    return len(held) > 1 and set().union(*inside) == found


def _list_indices(ranges: Ranges) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def _describe_count(wrong: int, size: int, dim: int) -> str:
    return f"{wrong} of {size} indices of dim {dim} {'is' if wrong == 1 else 'are'}"


def _describe_edge(e: Evidence, dim: int, wrong: torch.Tensor) -> str:
    """Whether the wrong indices are the first or last of every shard."""
    held = {piece.region.dims[dim] for piece in e.candidate.pieces if piece.region.flat is None}
    if len(held) < 2:
        return ""
    found = set(wrong.tolist())
    for word, edge in (("first", {ranges[0][0] for ranges in held}), ("last", {ranges[-1][1] - 1 for ranges in held})):
        if found and found <= edge:
            return f", the {word} of {'each shard' if found == edge else 'a shard'}"
    return ""


@cause(
    CauseName.BIAS,
    after="find_transposed_values",
    shown_by="one row too much, the same everywhere; how often the module's own bias it is",
    fault="bias on every rank",
)
def find_bias(e: Evidence) -> Cause | None:
    """Find one row too much or too little, the same everywhere: a bias."""
    pair = e.tensors if e.comparison.id.kind is Kind.OUTPUT and len(e.reference.shape) > 1 else None
    if pair is None:
        return None
    surplus = (pair[1] - pair[0]).flatten(0, -2)
    row = surplus.mean(0)
    rest = float((surplus - row).norm() / pair[0].norm())
    if len(surplus) < 2 or not e.is_explained_error(rest):
        return None
    return Cause(
        CauseName.BIAS,
        f"the candidate is the reference plus one row, the same everywhere{_describe_multiple(e, row)}",
        evidence=(f"without that row the error is {rest:.1e}",),
    )


def _describe_multiple(e: Evidence, row: torch.Tensor) -> str:
    """How many times the module's own bias the row is, if it is."""
    name = f"{e.comparison.id.name}.bias"
    own = LogicalTensor.of(e.reference_trace, TensorId.of(e.comparison.id.step, None, name, Kind.PARAM))
    if own is None or own.shape != tuple(row.shape):
        return ""
    values = own.tensor().to(torch.float64)
    count = round(float(values @ row / (values @ values).clamp_min(1e-300)))
    if count == 0 or _measure_relative(count * values, row) > MOST_OF_ERROR:
        return ""
    often = "once" if count == 1 else f"{count} times"
    return f": {name}, added {often} too often" if count > 0 else f": {name}, left out"


@cause(
    CauseName.WEAKER_DTYPE,
    after="find_other_step_count",
    shown_by="all values fit a weaker dtype, and the error is what that rounds away",
    fault="bfloat16 matmul",
)
def find_weaker_dtype(e: Evidence) -> Cause | None:
    """Find values that fit a weaker dtype than the reference's, with the error that this dtype makes."""
    ours = e.reference.dtype
    pair = e.tensors if e.comparison.id.kind is not Kind.UPDATE and ours.is_floating_point else None
    if pair is None:
        return None
    for weak in (torch.bfloat16, torch.float16):
        is_weak = e.candidate.dtype == weak or _is_exact_in(pair[1] / e.factor, weak)
        # What fits in the reference too was not rounded.
        if unit(weak) <= unit(ours) or not is_weak or _is_exact_in(pair[0], weak) or e.stats.error > 16 * unit(weak):
            continue
        name = str(weak).removeprefix("torch.")
        return Cause(
            CauseName.WEAKER_DTYPE,
            f"the candidate {'holds' if e.comparison.id.kind is Kind.PARAM else 'computes in'} {name} where the "
            f"reference has {str(ours).removeprefix('torch.')}",
            evidence=(f"every value fits {name}, and the error is {e.stats.error / unit(weak):.1g} of its roundings",),
        )
    return None


def _is_exact_in(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(torch.float32), values.to(dtype).to(torch.float32))


@cause(
    CauseName.PARTIAL_SUM,
    after="find_own_statistics",
    shown_by="each part is one rank's summand of a pending sum further inside",
    unproven="no entry passes a summand on; tests/judge/causes/test_values.py",
)
def find_partial_sum(e: Evidence) -> Cause | None:
    """Find parts that are one rank's summand of a pending sum: it was used without being summed."""
    if e.comparison.verdict is not Verdict.FAIL or not e.stats.finite_b or e.candidate.pending:
        return None
    wrong = e.wrong_pieces()
    for inner_id, shards in e.candidate_trace.shards.items():
        if not shards[0].record.pending or not _is_just_before(inner_id, e.comparison.id):
            continue
        inner = LogicalTensor.of(e.candidate_trace, inner_id)
        if inner is None or inner.shape != e.reference.shape:
            continue
        errors = [_measure_least(inner, replace(wrong, pieces=(piece,))) for piece in wrong.pieces]
        if errors and e.is_explained_error(max(errors)):
            axes = inner.pending
            return Cause(
                CauseName.PARTIAL_SUM,
                f"a partial sum was passed on: each part is one rank's summand of {inner_id.site}, never summed over "
                f"{', '.join(axes)}",
                axes[0] if len(axes) == 1 else None,
                (f"against that summand the error is {max(errors):.1e}",),
            )
    return None


def _is_just_before(inner: TensorId, own: TensorId) -> bool:
    """Whether a tensor may be what this one was made from by a sum: inside the same module, going the same way."""
    if (inner.step, inner.microbatch) != (own.step, own.microbatch) or inner == own:
        return False
    around = own.name if own.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) else own.name.rpartition(".")[0] or ROOT
    is_same_way = inner.kind.is_backward == own.kind.is_backward and inner.kind.is_of_param == own.kind.is_of_param
    return is_same_way and is_inside(inner.name, around)


def _measure_least(inner: LogicalTensor, part: LogicalTensor) -> float:
    """The error of a part against the summand that it is most like."""
    count = min(len(piece.summands) for piece in inner.pieces)
    alone = (
        replace(inner, pending=(), pieces=tuple(Piece(p.region, (p.summands[i],)) for p in inner.pieces))
        for i in range(count)
    )
    return min(measure(summand, part)[0].error for summand in alone)


def _measure_relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if a.shape == b.shape else math.inf
