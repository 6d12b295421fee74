"""Explanation of one tensor's verdict: its measurements, its layout and who decided it, and the tensors before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttrace.errors import TTraceError
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Comparison, Finding, Judgement
from ttrace.layouts.ids import TensorId
from ttrace.layouts.placement import Provenance
from ttrace.trace.reader import Shard, Trace

NUM_BEFORE = 6
"""The number of preceding tensors that are shown."""


@dataclass(frozen=True)
class StatedLayout:
    """A layout of the candidate's tensor, who decided it, and on which ranks."""

    layout: str
    by: Provenance | None
    ranks: tuple[int, ...]
    is_everywhere: bool
    """Whether all ranks that hold the tensor have this layout."""


@dataclass(frozen=True)
class Explanation:
    """Why a tensor was accused, or not."""

    comparison: Comparison
    layouts: tuple[StatedLayout, ...]
    """One, several if the ranks do not agree, or none if the candidate has no such tensor."""
    before: tuple[Comparison, ...]
    """The tensors just before it in the reference's order, of the same step and microbatch; the nearest last."""
    finding: Finding | None
    """The finding that accuses this tensor, alone or with others."""
    first_finding: Finding | None
    """The first finding of the run; most of what is wrong after it follows from it."""


def explain(judgement: Judgement, reference: Trace, candidate: Trace, tensor_id: TensorId) -> Explanation:
    """Collect what a judgement says about one tensor."""
    places = {comparison.id: at for at, comparison in enumerate(judgement.comparisons)}
    if tensor_id not in places:
        raise TTraceError(f"{tensor_id}: the check does not compare a tensor of this name.")
    at = places[tensor_id]
    return Explanation(
        judgement.comparisons[at],
        _find_layouts(tensor_id, reference, candidate),
        _find_before(tensor_id, judgement.comparisons[:at]),
        next((f for f in judgement.findings if f.comparison.id == tensor_id or tensor_id in f.covers), None),
        judgement.findings[0] if judgement.findings else None,
    )


def _find_before(tensor_id: TensorId, earlier: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Find what the microbatch computed just before; tensors without a microbatch count for all microbatches."""
    same = [c for c in earlier if c.id.step == tensor_id.step and not c.id.kind.is_of_call]
    if tensor_id.microbatch is not None:
        same = [c for c in same if c.id.microbatch in (None, tensor_id.microbatch)]
    return tuple(same[-NUM_BEFORE:])


def _find_layouts(tensor_id: TensorId, reference: Trace, candidate: Trace) -> tuple[StatedLayout, ...]:
    """Find the layouts by which the check read the candidate's shards, or else the recorded ones."""
    whole = LogicalTensor.of(reference, tensor_id)
    logical = LogicalTensor.of(candidate, tensor_id, whole.shape if whole is not None else None)
    shards: Sequence[Shard] = candidate.shards.get(tensor_id, [])
    if logical is not None:
        shards = [shard for piece in logical.pieces for replicas in piece.summands for shard in replicas]
    found: dict[tuple[str, Provenance | None], set[int]] = {}
    for shard in shards:
        found.setdefault((shard.record.layout, shard.record.by), set()).add(shard.coord.rank)
    all_ranks = {shard.coord.rank for shard in shards}
    return tuple(
        StatedLayout(layout, by, tuple(sorted(ranks)), ranks == all_ranks) for (layout, by), ranks in found.items()
    )
