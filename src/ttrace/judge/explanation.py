"""Explanation of one tensor's verdict: what was measured, who decided its layout, and what came before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttrace.errors import TTraceError
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Comparison, Finding, Judgement
from ttrace.layouts.ids import TensorId
from ttrace.layouts.source import Provenance
from ttrace.trace.reader import Shard, Trace

NUM_BEFORE = 6
"""How many tensors before it are shown."""


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
    """One, or several if the ranks do not agree; none if the candidate has no such tensor."""
    before: tuple[Comparison, ...]
    """The tensors just before it in the reference's order, of the same step and microbatch; the nearest last."""
    finding: Finding | None
    """The finding that accuses it, or that speaks for it and others."""
    first_finding: Finding | None
    """The first finding of the run; what is wrong after it mostly follows from it."""


def explain(judgement: Judgement, reference: Trace, candidate: Trace, tensor_id: TensorId) -> Explanation:
    """Collect what a judgement says about one tensor."""
    places = {comparison.id: at for at, comparison in enumerate(judgement.comparisons)}
    if tensor_id not in places:
        raise TTraceError(f"{tensor_id}: the check compares no such tensor.")
    at = places[tensor_id]
    return Explanation(
        judgement.comparisons[at],
        _find_layouts(tensor_id, reference, candidate),
        _find_before(tensor_id, judgement.comparisons[:at]),
        next((f for f in judgement.findings if f.comparison.id == tensor_id or tensor_id in f.covers), None),
        judgement.findings[0] if judgement.findings else None,
    )


def _find_before(tensor_id: TensorId, earlier: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """What one microbatch computed just before; what belongs to no microbatch counts for all of them."""
    same = [c for c in earlier if c.id.step == tensor_id.step and not c.id.kind.is_of_call]
    if tensor_id.microbatch is not None:
        same = [c for c in same if c.id.microbatch in (None, tensor_id.microbatch)]
    return tuple(same[-NUM_BEFORE:])


def _find_layouts(tensor_id: TensorId, reference: Trace, candidate: Trace) -> tuple[StatedLayout, ...]:
    """The layouts by which the check read the candidate's shards; those that it could not read are as recorded."""
    whole = LogicalTensor.of(reference, tensor_id)
    logical = LogicalTensor.of(candidate, tensor_id, whole.shape if whole is not None else None)
    shards: Sequence[Shard] = candidate.shards.get(tensor_id, [])
    if logical is not None:
        shards = [shard for piece in logical.pieces for replicas in piece.summands for shard in replicas]
    found: dict[tuple[str, Provenance | None], set[int]] = {}
    for shard in shards:
        found.setdefault((shard.record.layout, shard.record.by), set()).add(shard.coord.rank)
    everybody = {shard.coord.rank for shard in shards}
    return tuple(
        StatedLayout(layout, by, tuple(sorted(ranks)), ranks == everybody) for (layout, by), ranks in found.items()
    )
