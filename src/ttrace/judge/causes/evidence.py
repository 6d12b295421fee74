"""Evidence about a wrong tensor, and the decorator of the functions that find a cause in it.

A function that takes the evidence and returns a `Cause` or None becomes a `Detector` by the decorator `cause`, which
states the cause's name, when the function can answer at all, what shows the cause (docs/reference/commands.md lists
that), and which entry of the zoo proves it. `ttrace.judge.causes.DETECTORS` says in which order they are asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ttrace.judge.tensors.logical import LogicalTensor, factor_to_come, measure
from ttrace.judge.tensors.values import MOST_ROWS, RowSums, Values, sum_rows
from ttrace.judge.verdict import Cause, CauseName, Comparison, Verdict
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.trace.reader import Trace
from ttrace.values.chunks import Bounds
from ttrace.values.stats import LEAST_DIVISOR, Stats

MOST_TOLERANCES = 2.0
"""An explanation may leave an error of at most this many tolerances."""
MOST_OF_ERROR = 0.1
"""An explanation may leave at most this share of the error that it explains.

Under a loose tolerance nearly everything is a factor and a rest
(tests/judge/causes/test_reductions.py::test_a_factor_below_the_rest_is_not_claimed).
"""


class Block(NamedTuple):
    """The same part of both tensors in float64; the candidate's is multiplied by the evidence's factor."""

    bounds: Bounds
    ours: torch.Tensor
    """The reference's values."""
    theirs: torch.Tensor
    """The candidate's values."""

    def take(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Take the values of this block's indices of a dim, in a shape that broadcasts over the other dims."""
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
    """The sizes of the candidate's axes and, under `MICROBATCH_AXIS`, its number of microbatches."""
    factor: float
    """The factor that the candidate's later reduction applies to this tensor; 1 if there is none."""
    reference_trace: Trace
    candidate_trace: Trace
    is_linear: bool = False
    """Whether sketches may stand for values, because only sums and differences are taken."""

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
        """The tolerance of this tensor; 0 if it has none."""
        return self.comparison.tolerance.value if self.comparison.tolerance else 0.0

    @property
    def replica_tolerance(self) -> float:
        return self.comparison.replica_tolerance

    @property
    def stats(self) -> Stats:
        return self.comparison.stats

    def error_of(self, candidate: LogicalTensor, factor: float = 1.0) -> float:
        """Measure the error of another reading of the candidate's shards, times a factor."""
        return measure(self.reference, candidate, factor=self.factor * factor)[0].error

    def is_explained(self, rest: float) -> bool:
        """Whether an explanation leaves little enough of the difference between replicas."""
        return rest <= min(MOST_TOLERANCES * self.tolerance, MOST_OF_ERROR * self.comparison.replica_error)

    @property
    def is_too_large(self) -> bool:
        """Whether a dim has too many indices to look for patterns along it."""
        return max(self.reference.shape, default=0) > MOST_ROWS

    @cached_property
    def values(self) -> tuple[Values, Values] | None:
        """The values of both logical tensors; None if there are too few, or any is not finite."""
        is_fit = self.comparison.verdict is Verdict.FAIL and self.stats.finite_a and self.stats.finite_b
        if not is_fit or self.stats.count < 4 or self.stats.aa == 0.0:
            return None
        return self.make_values(self.reference), self.make_values(self.candidate, self.factor)

    def make_values(self, tensor: LogicalTensor, factor: float = 1.0) -> Values:
        """Make the values of a tensor that is to be compared with `values`."""
        if self.is_linear and self.num_buckets:
            return Values.of_sketch(tensor, self.num_buckets, factor)
        return Values(tensor, factor)

    @cached_property
    def linear(self) -> Evidence:
        """The same evidence for detectors that only add and subtract: sketches are then as good as values."""
        return replace(self, is_linear=True)

    @property
    def num_buckets(self) -> int:
        """The number of buckets of the sketches; 0 if both sides were recorded in full."""
        return max(self.reference.num_buckets, self.candidate.num_buckets)

    def blocks(self) -> Iterator[Block]:
        """Read both tensors block by block; yields nothing if `values` is None."""
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
        """The sums of squares and products of each index, by dim; empty if `values` is None."""
        return sum_rows(*self.values) if self.values is not None else {}

    def measure_rest(self, leave: Callable[[Block], torch.Tensor], *, most_blocks: int | None = None) -> float:
        """Measure the error that an explanation leaves, relative to the reference; `leave` computes it for a block."""
        rest = norm = 0.0
        for block in itertools.islice(self.blocks(), most_blocks):
            rest += float(leave(block).square().sum())
            norm += float(block.ours.square().sum())
        return math.sqrt(rest / max(norm, LEAST_DIVISOR))

    def is_explained_error(self, rest: float) -> bool:
        """Whether an explanation leaves little enough of the error."""
        return rest <= min(MOST_TOLERANCES * self.tolerance, MOST_OF_ERROR * self.stats.error)

    def wrong_pieces(self) -> LogicalTensor:
        """Return the candidate with only its wrong pieces, or with all if none is wrong by itself."""
        wrong = {part.ranks for part in self.comparison.region_errors if part.error > self.tolerance}
        pieces = tuple(piece for piece in self.candidate.pieces if piece.ranks in wrong)
        return replace(self.candidate, pieces=pieces or self.candidate.pieces)


@dataclass(frozen=True)
class KnownCause:
    """A cause with what shows it and what proves it: either an entry of the zoo, or the reason why there is none."""

    name: CauseName
    shown_by: str
    """What the values show, for the table of the docs."""
    bug: str = ""
    """The entry of the zoo that proves it."""
    unproven: str = ""
    """Why no entry of the zoo proves it; ends with the unit test that does."""

    def __post_init__(self) -> None:
        assert bool(self.bug) != bool(self.unproven), f"{self.name}: state one proof, or why there is none"


Find = Callable[[Evidence], Cause | None]


@dataclass(frozen=True, kw_only=True)
class Detector(KnownCause):
    """A function that finds a cause; it is called only for the verdict and the kinds for which it can answer."""

    find: Find
    verdict: Verdict | None = None
    """The only verdict that it explains; None if it explains several."""
    kinds: Collection[Kind] = frozenset(Kind)
    """The kinds of tensors in which it looks."""

    def __call__(self, evidence: Evidence) -> Cause | None:
        comparison = evidence.comparison
        if self.verdict not in (None, comparison.verdict) or comparison.id.kind not in self.kinds:
            return None
        return self.find(evidence)


def cause(
    name: CauseName,
    *,
    verdict: Verdict | None = None,
    kinds: Collection[Kind] = frozenset(Kind),
    shown_by: str,
    bug: str = "",
    unproven: str = "",
) -> Callable[[Find], Detector]:
    """Make a function a detector. It is asked only if `ttrace.judge.causes.DETECTORS` has it."""
    return lambda find: Detector(name, shown_by, bug, unproven, find=find, verdict=verdict, kinds=kinds)


def _count_microbatches(tensor_id: TensorId, candidate: Trace) -> int:
    """Count a rank's microbatches in a step if this tensor is a sum over them; otherwise return the stated number."""
    stated = candidate.manifest.num_microbatches
    kind = tensor_id.kind
    is_loss = kind is Kind.LOSS or tensor_id.site == Site(ROOT, Kind.OUTPUT, "loss")
    is_summed = kind.is_backward or kind.is_of_param or is_loss
    if stated > 1 or not is_summed:
        return stated
    first = candidate.ranks[0].records
    return max(len({r.id.microbatch for r in first if r.id.step == tensor_id.step} - {None}), 1)
