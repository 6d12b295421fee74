"""Causes that another tensor shows: the candidate holds its values, or one of its summands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ttrace.judge.causes.evidence import Evidence, cause
from ttrace.judge.tensors.logical import LogicalTensor, Piece, factor_to_come, measure
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId, drop_numbers, is_inside

_MOST_RELATIVES = 256
"""A tensor is compared with at most this many others: models have thousands of layers and experts."""


@cause(
    CauseName.OTHERS_VALUES,
    verdict=Verdict.FAIL,
    shown_by="the reference's values of another microbatch, step, call or layer",
    bug="stale-activations",
)
def find_others_values(evidence: Evidence) -> Cause | None:
    """Find the values of another microbatch, step, call or layer."""
    if evidence.stats.count < 4:
        return None
    wrong = evidence.wrong_pieces()
    for other_id, words in itertools.islice(_list_relatives(evidence), _MOST_RELATIVES):
        other = LogicalTensor.of(evidence.reference_trace, other_id)
        if other is None or other.shape != evidence.reference.shape:
            continue
        stats = measure(other, wrong, factor=evidence.factor)[0]
        if not stats.bb:
            return None  # zeros would match any other tensor of zeros
        if evidence.is_explained_error(stats.error):
            return Cause(
                CauseName.OTHERS_VALUES,
                f"the candidate holds the reference's values of {words}{_describe_position(evidence, other_id)}",
                evidence=(f"against {other_id} the error is {stats.error:.1e}",),
            )
    return None


@cause(
    CauseName.OTHERS_VALUES,
    verdict=Verdict.FAIL,
    kinds=(Kind.INPUT, Kind.GRAD_OUTPUT),
    shown_by="a message that was meant for another layer",
    bug="megatron-batched-p2p",
)
def find_misdirected_message(evidence: Evidence) -> Cause | None:
    """Find another layer's result in place of an input or an incoming gradient: a misdirected message."""
    own = evidence.comparison.id
    if evidence.stats.count < 4:
        return None
    for other_id in evidence.reference_trace.shards:
        is_sent = other_id.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) and other_id.step == own.step
        if not is_sent or not _is_neighbour(other_id.site, own.site):
            continue
        other = LogicalTensor.of(evidence.reference_trace, other_id)
        if other is None or other.shape != evidence.reference.shape:
            continue
        factor = factor_to_come(other_id, evidence.reference_trace, evidence.candidate_trace)
        error = measure(other, evidence.wrong_pieces(), factor=factor)[0].error
        if evidence.is_explained_error(error):
            return Cause(
                CauseName.OTHERS_VALUES,
                f"what arrived is {other_id} of the reference: a message that was meant for another layer",
                evidence=(f"against it the error is {error:.1e}",),
            )
    return None


@cause(
    CauseName.PARTIAL_SUM,
    verdict=Verdict.FAIL,
    shown_by="each part is one rank's summand of a pending sum further inside",
    unproven="no entry passes a summand on; tests/judge/causes/test_neighbours.py",
)
def find_partial_sum(evidence: Evidence) -> Cause | None:
    """Find parts that each are one rank's summand of a sum that is pending inside the module."""
    if not evidence.stats.finite_b or evidence.candidate.pending:
        return None
    wrong = evidence.wrong_pieces()
    for inner_id, shards in evidence.candidate_trace.shards.items():
        if not shards[0].record.pending or not _is_just_before(inner_id, evidence.comparison.id):
            continue
        inner = LogicalTensor.of(evidence.candidate_trace, inner_id)
        if inner is None or inner.shape != evidence.reference.shape:
            continue
        errors = [_measure_least(inner, replace(wrong, pieces=(piece,))) for piece in wrong.pieces]
        if errors and evidence.is_explained_error(max(errors)):
            axes = inner.pending
            return Cause(
                CauseName.PARTIAL_SUM,
                f"a partial sum was passed on: each part is one rank's summand of {inner_id.site}, never summed over "
                f"{', '.join(axes)}",
                axes[0] if len(axes) == 1 else None,
                (f"against that summand the error is {max(errors):.1e}",),
            )
    return None


def _describe_position(evidence: Evidence, other: TensorId) -> str:
    """Describe data of another step after a checkpoint, from which they must continue where they stopped."""
    own = evidence.comparison.id
    if not own.is_data or other.step == own.step or not evidence.candidate_trace.manifest.first_step:
        return ""
    return f": after the checkpoint, samples are {'repeated' if other.step < own.step else 'skipped'}"


def _list_relatives(evidence: Evidence) -> Iterator[tuple[TensorId, str]]:
    """List the tensors whose values the candidate may hold instead, with words for what differs."""
    own = evidence.comparison.id
    for other in evidence.reference_trace.shards:
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
    """Whether two names differ only in their numbers, as those of other layers and other experts do.

    Names of parameters may also differ in one part: a checkpoint may load one into another of the same block.
    """
    ours, theirs = a.name.split("."), b.name.split(".")
    num_different = sum(x != y for x, y in zip(ours, theirs, strict=False)) if len(ours) == len(theirs) else len(ours)
    is_sibling = a.kind is Kind.PARAM and num_different == 1
    return is_sibling or drop_numbers(a.name) == drop_numbers(b.name)


def _is_just_before(inner: TensorId, own: TensorId) -> bool:
    """Whether a sum over this inner tensor may have made the other: inside the same module, in the same direction."""
    if (inner.step, inner.microbatch) != (own.step, own.microbatch) or inner == own:
        return False
    around = own.name if own.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) else own.name.rpartition(".")[0] or ROOT
    is_same_way = inner.kind.is_backward == own.kind.is_backward and inner.kind.is_of_param == own.kind.is_of_param
    return is_same_way and is_inside(inner.name, around)


def _measure_least(inner: LogicalTensor, part: LogicalTensor) -> float:
    """Measure the error of a part against the summand that is nearest to it."""
    count = min(len(piece.summands) for piece in inner.pieces)
    alone = (
        replace(inner, pending=(), pieces=tuple(Piece(p.region, (p.summands[i],)) for p in inner.pieces))
        for i in range(count)
    )
    return min(measure(summand, part)[0].error for summand in alone)
