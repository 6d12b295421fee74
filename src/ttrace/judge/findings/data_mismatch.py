"""Data mismatches: if the two sides got different data, nothing that depends on it can be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ttrace.judge.reason import Reason, Why
from ttrace.judge.sentences import describe
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.verdict import Comparison, Verdict
from ttrace.layouts.ids import LABELS, ROOT, Kind, TensorId
from ttrace.trace.reader import Trace

_FED = (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.LOSS)
"""The kinds that every microbatch has."""


def find_data_mismatches(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[str]:
    """Say how the data of the two sides differ, one sentence for each difference."""
    counts = _compare_microbatches(reference, candidate)
    if counts:
        return [counts]
    batches = [c for c in comparisons if c.id.kind is Kind.BATCH]
    # A model's input that differs although it was made from the same batch is the candidate's own doing.
    outside = batches or [c for c in comparisons if is_from_outside(c)]
    if any(_is_of_other_step(c, reference, candidate) for c in outside):
        return []  # where the data go on after a checkpoint is judged, too
    sentences = [sentence for sentence in map(_explain_other_data, outside) if sentence]
    return sentences or _explain_unknown_labels(comparisons, (reference, candidate))


def is_labels(tensor_id: TensorId) -> bool:
    """Whether this is a record of labels that a script keeps."""
    return tensor_id.kind is Kind.BATCH and tensor_id.name == LABELS


def _explain_unknown_labels(comparisons: Sequence[Comparison], sides: Sequence[Trace]) -> list[str]:
    """Say that labels may differ, if nobody knows where they enter and the loss is the first that differs."""
    attachments = [side.manifest.attachment for side in sides]
    if all(attachment is None or attachment.labels for attachment in attachments):
        return []
    wrong = {c.id.kind for c in comparisons if c.verdict.is_wrong}
    if Kind.LOSS not in wrong or wrong & {Kind.INPUT, Kind.OUTPUT}:
        return []
    return [
        "the losses differ although the model's outputs agree, and it is not known where labels enter: either the loss "
        "is wrong, or the two sides use different labels. Load them with a DataLoader, pass them to a loss of "
        "torch.nn.functional, or call ttrace.attach and session.batch in the script."
    ]


def excuse_data(comparison: Comparison) -> Comparison:
    """Excuse a wrong tensor that other data explains; initial parameters and buffers do not depend on data."""
    is_start = comparison.id.kind in (Kind.PARAM, Kind.BUFFER) and comparison.id.step == 0
    if is_start or is_from_outside(comparison) or not comparison.verdict.is_wrong:
        return comparison
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.OTHER_DATA))


def is_from_outside(comparison: Comparison) -> bool:
    """Whether this is data that entered from outside."""
    return _is_data(comparison.id)


def _compare_microbatches(reference: Trace, candidate: Trace) -> str:
    first = candidate.manifest.first_step
    ours, theirs = _find_microbatches(reference, first), _find_microbatches(candidate, first)
    if not ours or not theirs or ours == theirs:
        return ""
    num_ours, num_theirs = (_count_first_step(found) for found in (ours, theirs))
    rows = _find_num_rows(reference)
    part = f"{rows} / {num_theirs} rows" if num_ours == 1 and rows and rows % num_theirs == 0 else "some of the rows"
    return (
        f"the two sides trained on different data: the reference ran {_describe(reference, num_ours)}, the candidate "
        f"ran {_describe(candidate, num_theirs)}. Nothing that depends on the data was judged. Let the reference run "
        f"the candidate's {num_theirs} microbatches too (accumulate their gradients, each loss divided by "
        f"{num_theirs}), or give each rank {part} of the reference's batch."
    )


def _find_microbatches(trace: Trace, first_step: int) -> frozenset[tuple[int, int]]:
    return frozenset(
        (tensor_id.step, tensor_id.microbatch)
        for tensor_id in trace.shards
        if tensor_id.kind in _FED and tensor_id.microbatch is not None and tensor_id.step >= first_step
    )


def _count_first_step(microbatches: frozenset[tuple[int, int]]) -> int:
    first = min(step for step, _ in microbatches)
    return sum(step == first for step, _ in microbatches)


def _describe(trace: Trace, num_microbatches: int) -> str:
    rows, sizes = _find_num_rows(trace), trace.mesh.sizes
    ranks = f" on {' '.join(f'{axis}={size}' for axis, size in sizes.items())}" if trace.manifest.num_ranks > 1 else ""
    count = f"{num_microbatches} microbatch{'es' if num_microbatches > 1 else ''}"
    return f"{count}{f' of {rows} rows' if rows else ''}{ranks}"


def _find_num_rows(trace: Trace) -> int | None:
    """The rows that a rank has of its first batch, as far as a first dim tells."""
    for tensor_id, shards in trace.shards.items():
        if _is_data(tensor_id) and shards[0].record.shape:
            return shards[0].record.shape[0]
    return None


def _explain_other_data(comparison: Comparison) -> str:
    """How a tensor that enters from outside is not the same on both sides, bit for bit; empty if it is."""
    if comparison.verdict.is_wrong or comparison.error > 0.0:
        count, worst = comparison.num_different, max(comparison.error, comparison.replica_error)
        how = f"by {worst:.1e}" if count is None else f"in {count} of {comparison.stats.count} elements"
        return (
            f"{comparison.id}: the candidate was fed other data than the reference (they differ {how}). "
            "Pass the batch through session.batch(...), or make both sides load the same."
        )
    if comparison.spoils:
        return (
            f"{comparison.id}: it is not known whether both sides were fed the same data: {describe(comparison.why)}. "
            "Nothing that depends on it was judged. Pass the same tensors through session.batch(...) on both sides."
        )
    return ""


def _is_of_other_step(comparison: Comparison, reference: Trace, candidate: Trace) -> bool:
    """Whether a candidate that goes on from a checkpoint was fed what the reference had in another step."""
    own = comparison.id
    if not candidate.manifest.first_step or not comparison.verdict.is_wrong:
        return False
    theirs = LogicalTensor.of(candidate, own)
    steps = {other.step for other in reference.shards} - {own.step}
    ours = (LogicalTensor.of(reference, own._replace(step=step)) for step in sorted(steps))
    return theirs is not None and any(
        one is not None and one.shape == theirs.shape and measure(one, theirs)[0].dd == 0.0 for one in ours
    )


def _is_data(tensor_id: TensorId) -> bool:
    return tensor_id.kind is Kind.BATCH or (tensor_id.kind is Kind.INPUT and tensor_id.name == ROOT)
