"""Evidence: what is known about a wrong tensor when its cause is searched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ttrace.judge.tensors.factor import factor_to_come
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.tensors.values import MOST_ROWS, RowSums, Values, sum_rows
from ttrace.judge.verdict import Comparison, Verdict
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.trace.reader import Trace
from ttrace.values.chunks import Bounds
from ttrace.values.stats import Stats

MOST_TOLERANCES = 2.0
"""An explanation leaves an error of at most this many tolerances,"""
MOST_OF_ERROR = 0.1
"""and at most this share of the error that it explains."""


class Block(NamedTuple):
    """The same part of both tensors, in float64, the factor applied."""

    bounds: Bounds
    ours: torch.Tensor
    theirs: torch.Tensor

    def take(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Take what belongs to this block's indices of a dim, so that it is spread over the other dims."""
        shape = (-1, *(1 for _ in self.bounds[dim + 1 :]))
        return values[slice(*self.bounds[dim])].view(shape)


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
    is_linear: bool = False
    """Whether sketches stand for values."""

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
        """Whether patterns along a dim were not looked for."""
        return max(self.reference.shape, default=0) > MOST_ROWS

    @cached_property
    def values(self) -> tuple[Values, Values] | None:
        """Both logical tensors, the factor applied; None if they show nothing, or are not both finite."""
        is_fit = self.comparison.verdict is Verdict.FAIL and self.stats.finite_a and self.stats.finite_b
        if not is_fit or self.stats.count < 4 or self.stats.aa == 0.0:
            return None
        return self.make_values(self.reference), self.make_values(self.candidate, self.factor)

    def make_values(self, tensor: LogicalTensor, factor: float = 1.0) -> Values:
        """Make the values of a tensor that is compared with these."""
        if self.is_linear and self.num_buckets:
            return Values.of_sketch(tensor, self.num_buckets, factor)
        return Values(tensor, factor)

    @cached_property
    def linear(self) -> Evidence:
        """The same for those that only add and subtract tensors of one shape: they may take sketches for values."""
        return replace(self, is_linear=True)

    @property
    def num_buckets(self) -> int:
        """Of the sketches; 0 if both sides were recorded in full."""
        return max(self.reference.num_buckets, self.candidate.num_buckets)

    def blocks(self) -> Iterator[Block]:
        """Read both tensors block by block, if there is anything to see in them."""
        if self.values is not None:
            yield from self._only_block if self.values[0].is_one_block else self._read_blocks(*self.values)

    @cached_property
    def _only_block(self) -> tuple[Block, ...]:
        return tuple(self._read_blocks(*self.values)) if self.values is not None else ()

    @staticmethod
    def _read_blocks(ours: Values, theirs: Values) -> Iterator[Block]:
        return (Block(bounds, ours.read(bounds), theirs.read(bounds)) for bounds in ours.cut())

    @cached_property
    def row_sums(self) -> dict[int, RowSums]:
        """Sums over the indices of each dim, if there is anything to see in them."""
        return sum_rows(*self.values) if self.values is not None else {}

    def measure_rest(self, leave: Callable[[Block], torch.Tensor], *, most_blocks: int | None = None) -> float:
        """Measure what an explanation leaves of the blocks, relative to the reference."""
        rest = norm = 0.0
        for block in itertools.islice(self.blocks(), most_blocks):
            rest += float(leave(block).square().sum())
            norm += float(block.ours.square().sum())
        return math.sqrt(rest / max(norm, 1e-300))

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
