"""Evidence: what is known about a wrong tensor when its cause is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ttrace.judge.tensors.factor import factor_to_come
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.verdict import Comparison, Verdict
from ttrace.tensors.ids import ROOT, Kind, Site, TensorId
from ttrace.tensors.mesh import MICROBATCH_AXIS, Mesh
from ttrace.trace.reader import Trace
from ttrace.values.stats import Stats

MOST_TOLERANCES = 2.0
"""An explanation leaves an error of at most this many tolerances,"""
MOST_OF_ERROR = 0.1
"""and at most this share of the error that it explains."""
MOST_ELEMENTS = 1 << 24
"""Larger tensors are not assembled to look for patterns in them."""


@dataclass(frozen=True)
class Evidence:
    """A wrong comparison with the shards of both sides."""

    comparison: Comparison
    reference: LogicalTensor
    candidate: LogicalTensor
    mesh: Mesh
    sizes: Mapping[str, int]
    factor: float
    """What the candidate's reduction still applies."""
    reference_trace: Trace
    candidate_trace: Trace

    @classmethod
    def of(cls, comparison: Comparison, reference: Trace, candidate: Trace) -> Evidence | None:
        """Collect the evidence for a comparison; None if one side's layout is not known."""
        a = LogicalTensor.of(reference, comparison.id)
        b = LogicalTensor.of(candidate, comparison.id, a.shape if a else None)
        if a is None or b is None:
            return None
        factor = factor_to_come(comparison.id, reference, candidate)
        sizes = {**candidate.sizes, MICROBATCH_AXIS: _count_microbatches(comparison.id, candidate)}
        return cls(comparison, a, b, candidate.mesh, sizes, factor, reference, candidate)

    @property
    def tolerance(self) -> float:
        return self.comparison.tolerance.value if self.comparison.tolerance else 0.0

    @property
    def replica_tolerance(self) -> float:
        return self.comparison.replica_tolerance

    @property
    def stats(self) -> Stats:
        return self.comparison.stats

    def error_of(self, candidate: LogicalTensor, factor: float = 1.0) -> float:
        return measure(self.reference, candidate, factor=self.factor * factor)[0].error

    def is_explained(self, rest: float) -> bool:
        """Whether the explanation leaves little enough of the difference between replicas."""
        return rest <= min(MOST_TOLERANCES * self.tolerance, MOST_OF_ERROR * self.comparison.replica_error)

    @property
    def is_too_large(self) -> bool:
        """Whether patterns in the values were not looked for."""
        return self.stats.count > MOST_ELEMENTS

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both logical tensors in float64, the factor applied; None if they are large, or not both finite."""
        is_fit = self.comparison.verdict is Verdict.FAIL and self.stats.finite_a and self.stats.finite_b
        if not is_fit or not 4 <= self.stats.count <= MOST_ELEMENTS or self.stats.aa == 0.0:
            return None
        return self.reference.tensor().to(torch.float64), self.candidate.tensor().to(torch.float64) * self.factor

    def is_explained_error(self, rest: float) -> bool:
        """Whether the explanation leaves little enough of the error."""
        return rest <= min(MOST_TOLERANCES * self.tolerance, MOST_OF_ERROR * self.stats.error)

    def wrong_pieces(self) -> LogicalTensor:
        """The candidate with only those pieces that are wrong by themselves."""
        wrong = {part.ranks for part in self.comparison.region_errors if part.error > self.tolerance}
        pieces = tuple(piece for piece in self.candidate.pieces if piece.ranks in wrong)
        return replace(self.candidate, pieces=pieces or self.candidate.pieces)


def _count_microbatches(tensor_id: TensorId, candidate: Trace) -> int:
    """How many microbatches a rank runs in a step, where what they make is summed; else what was stated."""
    stated = candidate.manifest.num_microbatches
    kind = tensor_id.kind
    is_loss = kind is Kind.LOSS or tensor_id.site == Site(ROOT, Kind.OUTPUT, "loss")
    is_summed = kind.is_backward or kind.is_of_param or is_loss
    if stated > 1 or not is_summed:
        return stated
    first = candidate.ranks[0].records
    return max(len({r.id.microbatch for r in first if r.id.step == tensor_id.step} - {None}), 1)
