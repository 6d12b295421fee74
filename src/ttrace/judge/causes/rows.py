"""Causes that the values show: another tensor's, some rows only, a row too much, or too few bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence
from ttrace.judge.causes.formulas import count_part
from ttrace.judge.causes.index_names import name_indices
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.factor import factor_to_come
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure
from ttrace.judge.tensors.values import Values, measure_common_row, sketch_rows
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId, drop_numbers, is_inside
from ttrace.tensors.ranges import Ranges

_MOST_RELATIVES = 256
"""With how many tensors one is compared whose values it may have; models have thousands of layers and experts."""


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
    for other_id, words in itertools.islice(_list_relatives(e), _MOST_RELATIVES):
        other = LogicalTensor.of(e.reference_trace, other_id)
        if other is None or other.shape != e.reference.shape:
            continue
        found = measure(other, wrong, factor=e.factor)[0]
        error = found.error
        if not found.bb:
            return None  # zeros would match any tensor of zeros
        if error <= min(MOST_TOLERANCES * e.tolerance, MOST_OF_ERROR * e.stats.error):
            return Cause(
                CauseName.OTHERS_VALUES,
                f"the candidate holds the reference's values of {words}{_describe_position(e, other_id)}",
                evidence=(f"against {other_id} the error is {error:.1e}",),
            )
    return None


def _describe_position(e: Evidence, other: TensorId) -> str:
    """Say what it means that data are those of another step: after a checkpoint they must go on where they were."""
    own = e.comparison.id
    is_data = own.kind is Kind.BATCH or (own.kind is Kind.INPUT and own.name == ROOT)
    if not is_data or other.step == own.step or not e.candidate_trace.manifest.first_step:
        return ""
    return f": after the checkpoint, samples are {'repeated' if other.step < own.step else 'skipped'}"


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
    CauseName.SOME_ROWS,
    after="find_attention_scores",
    shown_by="only some indices of a dim are wrong",
    fault="first rows lost",
)
def find_wrong_rows(e: Evidence) -> Cause | None:
    """Find a few wrong indices of one dim, if all others are right."""
    for dim, sums in e.row_sums.items():
        a, d = sums.aa, sums.dd
        size = len(a)
        if size < 3:
            continue
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
    shape = e.reference.shape
    if e.comparison.id.kind is not Kind.OUTPUT or len(shape) < 2 or e.stats.count // shape[-1] < 2:
        return None
    if e.num_buckets:
        return _find_own_bias(e.linear)
    if e.values is None:
        return None
    row, rest = measure_common_row(*e.values)
    if not e.is_explained_error(rest):
        return None
    return Cause(
        CauseName.BIAS,
        f"the candidate is the reference plus one row, the same everywhere{_describe_multiple(e, row)}",
        evidence=(f"without that row the error is {rest:.1e}",),
    )


def _find_own_bias(e: Evidence) -> Cause | None:
    """Find the module's own bias, added too often or left out, in sketches: those of all its rows are known."""
    name, own = _find_bias(e)
    if own is None or e.values is None:
        return None
    sketch = sketch_rows(own.tensor(), e.reference.shape, e.num_buckets)
    count, rest = count_part(e, Values.of_numbers(sketch))
    if not count:
        return None
    return Cause(
        CauseName.BIAS,
        f"the candidate is the reference plus one row, the same everywhere{_describe_count_of(name, count)}",
        evidence=(f"without that row the error is {rest:.1e}",),
    )


def _describe_multiple(e: Evidence, row: torch.Tensor) -> str:
    """How many times the module's own bias the row is, if it is."""
    name, own = _find_bias(e)
    if own is None:
        return ""
    values = own.tensor().to(torch.float64)
    count = round(float(values @ row / (values @ values).clamp_min(1e-300)))
    if count == 0 or float((count * values - row).norm()) > MOST_OF_ERROR * float((count * values).norm()):
        return ""
    return _describe_count_of(name, count)


def _find_bias(e: Evidence) -> tuple[str, LogicalTensor | None]:
    """The module's own bias, and its name."""
    name = f"{e.comparison.id.name}.bias"
    own = LogicalTensor.of(e.reference_trace, TensorId.of(e.comparison.id.step, None, name, Kind.PARAM))
    return name, own if own is not None and own.shape == e.reference.shape[-1:] else None


def _describe_count_of(name: str, count: int) -> str:
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
    if e.values is None or e.comparison.id.kind is Kind.UPDATE or not ours.is_floating_point:
        return None
    for weak in (torch.bfloat16, torch.float16):
        if unit(weak) <= unit(ours) or e.stats.error > 16 * unit(weak):
            continue
        is_weak = e.candidate.dtype == weak or all(_is_exact_in(b.theirs / e.factor, weak) for b in e.blocks())
        # What fits in the reference too was not rounded.
        if not is_weak or all(_is_exact_in(block.ours, weak) for block in e.blocks()):
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
