"""Causes that the numbers themselves show: not finite, zero, off by a constant, or too few bits."""

from __future__ import annotations

import math

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, Evidence, cause
from ttrace.judge.tensors.logical import LogicalTensor, factor_to_come
from ttrace.judge.tolerance.twins import unit
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.reader import Trace
from ttrace.values.chunks import cut_chunks
from ttrace.values.stats import add_terms

SAME = 1e-3
"""A number that was added everywhere may vary by this share of it, because sums are rounded."""
_MOST_LOGITS = 1 << 26
"""The cause of a padded vocabulary is not looked for in logits of more elements."""


@cause(
    CauseName.NOT_FINITE,
    shown_by="the candidate is not finite where the reference is, and where first",
    bug="overflow",
)
def find_not_finite(evidence: Evidence) -> Cause | None:
    """Find NaN and infinite elements where the reference is finite."""
    if evidence.stats.finite_b or not evidence.stats.finite_a:
        return None
    return Cause(
        CauseName.NOT_FINITE,
        "the candidate is not finite where the reference is",
        evidence=() if evidence.candidate.num_buckets else (_count_not_finite(evidence),),
    )


@cause(
    CauseName.ZEROS,
    verdict=Verdict.FAIL,
    shown_by="the candidate is zero everywhere",
    bug="gradient-detached",
)
def find_zeros(evidence: Evidence) -> Cause | None:
    """Find a tensor that is zero everywhere although the reference's is not."""
    # Not of replicas that differ: their statistics are those of the first replica.
    is_zero = evidence.stats.bb == 0.0 and evidence.stats.aa != 0.0
    return Cause(CauseName.ZEROS, "the candidate is zero everywhere") if is_zero else None


@cause(
    CauseName.OFFSET,
    shown_by="integers that differ from the reference's by one number on each rank, as positions with another start "
    "do; or a parameter or buffer that is the reference's plus one number",
    bug="checkpoint-norms-shifted-twice",
)
def find_offset(evidence: Evidence) -> Cause | None:
    """Find integers that are the reference's plus one number for each rank: positions with another start."""
    if evidence.reference.dtype == torch.bool or evidence.values is None or evidence.num_buckets:
        return None
    if evidence.reference.dtype.is_floating_point:
        return _find_added_number(evidence)
    surplus: dict[int, set[int]] = {}
    counts = dict.fromkeys(range(len(evidence.candidate.pieces)), 0)
    for block in evidence.blocks():
        here = Region(evidence.reference.shape, tuple((run,) for run in block.bounds))
        gaps = (block.theirs - block.ours).round()
        for number, piece in enumerate(evidence.candidate.pieces):
            for part, _ in here.overlaps(piece.region):
                counts[number] += part.of(gaps).numel()
                surplus.setdefault(number, set()).update(map(int, part.of(gaps).unique().tolist()))
                if len(surplus[number]) > 1:
                    return None
    if any(counts[number] < 2 for number in surplus):
        return None
    shifts: dict[int, set[int]] = {}
    for number, [by] in surplus.items():
        shifts.setdefault(by, set()).update(evidence.candidate.pieces[number].ranks)
    right = shifts.pop(0, set())
    named = [
        f"{_name_ranks(ranks, alone=not right and len(shifts) == 1)}: reference {by:+d}" for by, ranks in shifts.items()
    ]
    words = ", ".join(named).replace("reference +", "reference + ").replace("reference -", "reference - ")
    return Cause(CauseName.OFFSET, f"integers differ by a constant; {words}")


@cause(
    CauseName.COUNT,
    verdict=Verdict.FAIL,
    shown_by="an integer that both sides have computed, such as the number of labels in a batch, is another one",
    unproven="no entry has wrong integers; tests/judge/causes/test_numbers.py",
)
def find_count(evidence: Evidence) -> Cause | None:
    """Find a single integer that differs from the reference's."""
    is_count = evidence.stats.count == 1 and not evidence.reference.dtype.is_floating_point
    if not is_count or evidence.reference.dtype == torch.bool or evidence.candidate.num_buckets:
        return None
    ours, theirs = (int(side.tensor().flatten()[0]) for side in (evidence.reference, evidence.candidate))
    return Cause(CauseName.COUNT, f"both sides count, and the candidate comes to {theirs}, the reference to {ours}")


@cause(
    CauseName.PADDED_VOCABULARY,
    kinds=(Kind.LOSS,),
    shown_by="logits agree, and their gradients are those of a softmax over the padded tokens too",
    unproven="it needs two implementations; tests/ports/test_ports.py",
)
def find_padded_vocabulary(evidence: Evidence) -> Cause | None:
    """Find a loss whose softmax includes padded tokens, for which the reference has no logits."""
    tensor_id = evidence.comparison.id
    if tensor_id.site != Site(ROOT, Kind.LOSS):
        return None
    for name, count in evidence.candidate_trace.manifest.padding.items():
        if any(_is_softmax_over_more(evidence, each, count) for each in _find_outputs(evidence, tensor_id, name)):
            return Cause(
                CauseName.PADDED_VOCABULARY,
                f"the softmax of the loss is taken over {count} padded tokens too, which the reference does not have: "
                "leave them out of the loss",
                evidence=(f"{name} has {count} rows of padding",),
            )
    return None


@cause(
    CauseName.WEAKER_DTYPE,
    shown_by="all values fit a weaker dtype, and the error is what that rounds away",
    bug="bfloat16-matmul",
)
def find_weaker_dtype(evidence: Evidence) -> Cause | None:
    """Find values that fit a weaker dtype than the reference's, with the error that rounding to it makes."""
    ours = evidence.reference.dtype
    if evidence.values is None or evidence.comparison.id.kind is Kind.UPDATE or not ours.is_floating_point:
        return None
    for weak in (torch.bfloat16, torch.float16):
        if unit(weak) <= unit(ours) or evidence.stats.error > 16 * unit(weak):
            continue
        is_weak = evidence.candidate.dtype == weak or all(
            _is_exact_in(b.theirs / evidence.factor, weak) for b in evidence.blocks()
        )
        # If the reference fits too, nothing was rounded.
        if not is_weak or all(_is_exact_in(block.ours, weak) for block in evidence.blocks()):
            continue
        name = str(weak).removeprefix("torch.")
        return Cause(
            CauseName.WEAKER_DTYPE,
            f"the candidate {'holds' if evidence.comparison.id.kind is Kind.PARAM else 'computes in'} {name} where the "
            f"reference has {str(ours).removeprefix('torch.')}",
            evidence=(
                f"every value fits {name}, and the error is {evidence.stats.error / unit(weak):.1g} of its roundings",
            ),
        )
    return None


def _count_not_finite(evidence: Evidence) -> str:
    return f"{evidence.stats.nan_b} NaN and {evidence.stats.inf_b} infinite elements{_locate_not_finite(evidence)}"


def _locate_not_finite(evidence: Evidence) -> str:
    for piece in evidence.candidate.pieces:
        for cut in cut_chunks(piece.region.local_shape):
            bad = (~add_terms(piece.terms(), tuple(slice(*run) for run in cut)).isfinite()).nonzero()
            if len(bad):
                first = [start + int(i) for (start, _), i in zip(cut, bad[0], strict=True)]
                index = piece.region.find_index(first)
                return f", the first at {index} on rank {', '.join(map(str, piece.ranks))}"
    return ""


def _find_added_number(evidence: Evidence) -> Cause | None:
    """Find a parameter or buffer to which one number was added everywhere."""
    if evidence.comparison.id.kind not in (Kind.PARAM, Kind.BUFFER) or evidence.stats.count < 2:
        return None
    gaps = [bound for block in evidence.blocks() for bound in (block.theirs - block.ours).aminmax()]
    low, high = float(min(gaps)), float(max(gaps))
    if low == 0.0 or abs(high - low) > SAME * abs(low):
        return None
    return Cause(CauseName.OFFSET, f"every value is the reference's {'+' if low > 0 else '-'} {abs(low):.4g}")


def _name_ranks(ranks: set[int], *, alone: bool) -> str:
    return "all ranks" if alone else f"rank {', '.join(map(str, sorted(ranks)))}"


def _find_outputs(evidence: Evidence, tensor_id: TensorId, parameter: str) -> list[TensorId]:
    """Find the outputs of the module whose parameter is padded, in the microbatch of the loss."""
    module = parameter.rpartition(".")[0]
    where = tensor_id.step, tensor_id.microbatch, module, Kind.OUTPUT
    return [t for t in evidence.reference_trace.shards if (t.step, t.microbatch, t.name, t.kind) == where]


def _is_softmax_over_more(evidence: Evidence, output: TensorId, count: int) -> bool:
    """Whether the gradients of logits show this number of further logits, which are zero because their weights are."""
    ours, theirs = (
        _read(trace, output.at(Kind.GRAD_OUTPUT)) for trace in (evidence.reference_trace, evidence.candidate_trace)
    )
    logits = _read(evidence.reference_trace, output)
    if logits is None or ours is None or theirs is None:
        return False
    probabilities = logits.softmax(-1)
    # The gradient of a logit is its probability times the row's weight in the loss, except for the label.
    weight = (ours / probabilities).median(-1, keepdim=True).values
    change = weight * probabilities * (count / (logits.exp().sum(-1, keepdim=True) + count))
    factor = factor_to_come(output.at(Kind.GRAD_OUTPUT), evidence.reference_trace, evidence.candidate_trace)
    rest = theirs * factor - (ours - change)
    return float(rest.norm()) <= MOST_OF_ERROR * float(change.norm())


def _read(trace: Trace, tensor_id: TensorId) -> torch.Tensor | None:
    logical = LogicalTensor.of(trace, tensor_id)
    if logical is None or math.prod(logical.shape) > _MOST_LOGITS:
        return None
    return logical.tensor().to(torch.float64)


def _is_exact_in(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(torch.float32), values.to(dtype).to(torch.float32))
