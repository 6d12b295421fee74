"""This module compares a candidate's trace with the reference's, id by id."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ttrace.judge.logical import Logical, measured
from ttrace.judge.origin import findings
from ttrace.judge.tolerance import MARGIN, Sample, is_zero, tolerances
from ttrace.judge.verdict import ZERO, Comparison, Judgement, Part, Tolerance, Verdict
from ttrace.layouts.placed import INFERRED
from ttrace.tensors.ids import ROOT, Kind, TensorId
from ttrace.trace.reader import Shard, Trace
from ttrace.values.stats import stats

Progress = Callable[[int, int], None]
"""Told how many of how many tensors are done."""


def check(
    reference: Trace,
    twins: Sequence[Trace],
    candidate: Trace,
    *,
    margin: float = MARGIN,
    progress: Progress | None = None,
) -> Judgement:
    """Judge every tensor that either side recorded."""
    bench = _Bench(reference, tuple(twins), candidate)
    ids = bench.ids()
    known = tolerances(bench.samples(), margin=margin)
    comparisons = []
    for done, tensor_id in enumerate(ids):
        comparisons.append(bench.comparison(tensor_id, known.get(tensor_id)))
        if progress is not None:
            progress(done + 1, len(ids))
    return Judgement(
        tuple(comparisons),
        findings(comparisons, reference, candidate),
        tuple(bench.problems(comparisons)),
        (*reference.notes, *candidate.notes, *_inferred_note(comparisons)),
    )


@dataclass(frozen=True)
class _Bench:
    """The traces on the table."""

    reference: Trace
    twins: tuple[Trace, ...]
    candidate: Trace

    def ids(self) -> list[TensorId]:
        """Everything either side has, in the reference's order of appearance."""
        return list(dict.fromkeys([*self.reference.shards, *self.candidate.shards]))

    def samples(self) -> list[Sample]:
        samples = []
        for tensor_id, shards in self.reference.shards.items():
            logical = Logical.found(self.reference, tensor_id)
            if logical is None:
                continue
            errors = []
            for twin in self.twins:
                other = Logical.found(twin, tensor_id, logical.shape)
                if other is not None and other.shape == logical.shape:
                    errors.append(measured(logical, other)[0].error)
            samples.append(Sample(tensor_id, math.prod(logical.shape), shards[0].record.dtype, tuple(errors)))
        return samples

    def comparison(self, tensor_id: TensorId, tolerance: Tolerance | None) -> Comparison:
        ours = self.reference.shards.get(tensor_id)
        theirs = self.candidate.shards.get(tensor_id)
        if not ours or not theirs:
            side = "candidate" if ours else "reference"
            return Comparison(tensor_id, Verdict.MISSING, f"the {side} has no such tensor")
        a = Logical.found(self.reference, tensor_id)
        if a is None or tolerance is None:
            return Comparison(tensor_id, Verdict.UNJUDGED, "the reference's layout is not known")
        b = Logical.found(self.candidate, tensor_id, a.shape)
        order = ours[0].record.order
        if b is None:
            return Comparison(tensor_id, Verdict.UNJUDGED, _no_layout(theirs, a), order=order)
        reason = self._misfit(tensor_id, a, b)
        if reason is not None:
            verdict, text = reason
            return Comparison(tensor_id, verdict, text, layout=b.layout, by=b.by, order=order)
        return self._judged(tensor_id, a, b, tolerance, order)

    def _misfit(self, tensor_id: TensorId, a: Logical, b: Logical) -> tuple[Verdict, str] | None:
        """Why the candidate's shards do not make up the reference's tensor, decided without looking at data."""
        if a.shape != b.shape:
            return Verdict.UNJUDGED, f"the candidate's shape {b.shape} is not the reference's {a.shape}"
        cover = b.coverage()
        if cover.num_gap:
            return Verdict.GAP, f"nobody holds {cover.num_gap} elements, the first at {cover.first_gap}"
        if cover.num_overlap:
            return Verdict.UNJUDGED, f"different shards hold the same {cover.num_overlap} elements"
        if b.lacks_summands(self.candidate.sizes):
            return Verdict.GAP, f"a summand over {', '.join(b.pending)} is missing"
        absent = self._absent(tensor_id, b)
        if absent:
            return Verdict.MISSING, f"rank {absent[0]} owns the module but has no such tensor"
        return None

    def _absent(self, tensor_id: TensorId, b: Logical) -> list[int]:
        """Ranks that own the module and ran this microbatch, but recorded nothing here."""
        present = {rank for piece in b.pieces for rank in piece.ranks}
        expected = self.candidate.owners(tensor_id.name)
        if tensor_id.microbatch is not None:
            expected = expected & self._ran[tensor_id.step, tensor_id.microbatch]
        return sorted(expected - present)

    @cached_property
    def _ran(self) -> dict[tuple[int, int], frozenset[int]]:
        """The ranks that recorded anything of a step's microbatch."""
        found: dict[tuple[int, int], set[int]] = {}
        for tensor_id, shards in self.candidate.shards.items():
            if tensor_id.microbatch is not None:
                ranks = found.setdefault((tensor_id.step, tensor_id.microbatch), set())
                ranks.update(shard.coord.rank for shard in shards)
        return {key: frozenset(ranks) for key, ranks in found.items()}

    def _judged(self, tensor_id: TensorId, a: Logical, b: Logical, tolerance: Tolerance, order: int) -> Comparison:
        factor = self._factor(tensor_id)
        total, parts = measured(a, b, factor=factor)
        replica_error = max((_disagreement(x, y) for piece in b.pieces for x, y in piece.replica_pairs()), default=0.0)
        verdict, reason = _verdict(tensor_id, total.error, replica_error, tolerance)
        return Comparison(
            tensor_id,
            verdict,
            reason,
            total,
            tolerance,
            tuple(Part(piece.ranks, part.error) for piece, part in parts),
            replica_error,
            b.layout,
            b.by,
            order,
        )

    def _factor(self, tensor_id: TensorId) -> float:
        """What the candidate's reduction still applies, relative to the reference's: to activation gradients only."""
        if not tensor_id.kind.is_activation_grad:
            return 1.0
        return self.candidate.manifest.grad_factor / self.reference.manifest.grad_factor

    def problems(self, comparisons: list[Comparison]) -> list[str]:
        found = [*self.reference.problems(), *self.candidate.problems()]
        for twin in self.twins:
            found += twin.problems()
        if not self.reference.shards or not self.candidate.shards:
            found.append("nothing was recorded: the traced steps never ran inside `with session.step():`")
        found += [_different_data(comparison) for comparison in comparisons if _is_data(comparison)]
        found += [_idle(axis, size) for axis, size in self._idle_axes(comparisons)]
        return found

    def _idle_axes(self, comparisons: list[Comparison]) -> list[tuple[str, int]]:
        """Axes that cut, sum and distribute nothing: the candidate is not what its author believes."""
        sizes = self.candidate.mesh.sizes
        idle = {axis for axis, size in sizes.items() if size > 1}
        for comparison in comparisons:
            words = comparison.layout.replace("+", "/").replace(":", "/").split()
            idle -= {word for text in words for word in text.split("/")[1:]}
        for shards in self.candidate.shards.values():
            if not idle:
                break
            for axis in tuple(idle):
                if len({shard.coord[axis] for shard in shards}) < sizes[axis]:
                    idle.discard(axis)
        return [(axis, sizes[axis]) for axis in sizes if axis in idle]


def _verdict(tensor_id: TensorId, error: float, replica_error: float, tolerance: Tolerance) -> tuple[Verdict, str]:
    if is_zero((tolerance.twin_error,)):
        return Verdict.UNJUDGED, ZERO
    allowed = 0.0 if tensor_id.kind is Kind.PARAM_AFTER else tolerance.value
    if replica_error > allowed:
        return Verdict.CONFLICT, f"replicas differ by {replica_error:.1e}"
    return (Verdict.PASS if error <= tolerance.value else Verdict.FAIL), ""


def _disagreement(a: Shard, b: Shard) -> float:
    x, y = a.tensor(), b.tensor()
    return 0.0 if x.equal(y) else stats(x, y).error


def _no_layout(shards: list[Shard], a: Logical) -> str:
    held = sorted({shard.record.shape for shard in shards})
    return f"no layout: the ranks hold {', '.join(map(str, held))} of {a.shape}; add a rule for this site"


def _is_data(comparison: Comparison) -> bool:
    """Data that enters from outside must be the same on both sides, bit for bit."""
    tensor_id = comparison.id
    from_outside = tensor_id.kind is Kind.BATCH or (tensor_id.kind is Kind.INPUT and tensor_id.name == ROOT)
    return from_outside and (comparison.verdict.is_wrong or comparison.error > 0.0)


def _different_data(comparison: Comparison) -> str:
    return (
        f"{comparison.id}: the candidate was fed other data than the reference (they differ by "
        f"{comparison.error:.1e}). Pass the batch through session.batch(...), or make both sides load the same samples."
    )


def _idle(axis: str, size: int) -> str:
    return (
        f"axis {axis}={size} cuts, sums and distributes nothing: the {size} ranks along it only repeat each other. "
        "Is the model really parallelised?"
    )


def _inferred_note(comparisons: list[Comparison]) -> list[str]:
    count = sum(comparison.by == INFERRED for comparison in comparisons)
    return [f"{count} of {len(comparisons)} layouts were inferred from shapes"] if count else []
