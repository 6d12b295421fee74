"""Self-test: put known faults into a candidate's tensors, in memory, and see which of them the check reveals.

A tensor that would also pass with a lost shard protects nothing. Each fault takes the path of a real one, through
layouts, replicas and tolerances, so the result shows what the check can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override  # the standard library has it only from Python 3.12 on

from ttrace.judge.compare import Comparer
from ttrace.judge.engine import OnProgress
from ttrace.judge.reach import find_blind_spots
from ttrace.judge.reason import describe
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Comparison, Exit, Judgement, Verdict, Weakness
from ttrace.layouts.ids import TensorId
from ttrace.trace.reader import Shard, Trace


@dataclass(frozen=True)
class Altered(Shard):
    """A shard with changed values."""

    values: torch.Tensor

    @override  # mypy then notices if the overridden method is renamed
    def read_stored(self) -> torch.Tensor:
        return self.values


Injection = Callable[[TensorId, list[Shard], Trace], list[Shard] | None]
"""Returns the shards of an id with a fault; None if the tensor cannot have that fault."""


@dataclass(frozen=True)
class Power:
    """What one tensor would reveal."""

    comparison: Comparison
    seen: Mapping[str, bool]
    """For each fault, whether it was seen; faults that this tensor cannot have are left out."""

    @property
    def is_judged(self) -> bool:
        return self.comparison.verdict is Verdict.PASS

    @property
    def error(self) -> float | None:
        """The check reveals any change of at least this size, relative to the tensor; None if it reveals nothing."""
        return self.comparison.detectable_error

    @property
    def scale(self) -> float | None:
        """The smallest factor above 1 that the error or the scale reveals."""
        tolerance = self.comparison.tolerance
        if self.error is None or tolerance is None:
            return None
        return 1 + min(self.error, tolerance.scale + self.comparison.scale_error)

    @property
    def protects(self) -> bool:
        """Whether the check would see at least a lost shard."""
        if self.error is None:
            return False
        return self.seen.get(LOST_SHARD, self.error < 1.0)

    @property
    def reason(self) -> str:
        """Why this tensor protects nothing."""
        if not self.is_judged:
            return describe(self.comparison.why)
        return "its tolerance is so wide that a lost shard passes"


@dataclass(frozen=True)
class SelfTest:
    """What the check of a clean run would have revealed."""

    powers: tuple[Power, ...]
    unprotected: Mapping[str, Weakness]
    """The parameters whose faults no tensor would reveal, and why."""

    @property
    def exit(self) -> Exit:
        return Exit.UNJUDGED if self.unprotected else Exit.PASSED


def run_selftest(
    rounding: ToleranceModel, candidate: Trace, judgement: Judgement, *, progress: OnProgress | None = None
) -> SelfTest:
    """Put every fault into every tensor that passed, one at a time."""
    shards = dict(candidate.shards)
    comparer = Comparer(rounding.reference, rounding, candidate.with_shards(shards))
    powers = []
    for done, comparison in enumerate(judgement.comparisons, start=1):
        seen = {}
        if comparison.verdict is Verdict.PASS:
            original = candidate.shards[comparison.id]
            for name, wrong in inject_faults(comparison.id, candidate):
                shards[comparison.id] = wrong
                seen[name] = comparer.comparison(comparison.id).verdict.is_wrong
            shards[comparison.id] = original
        powers.append(Power(comparison, seen))
        if progress is not None:
            progress(done, len(judgement.comparisons))
    blind = frozenset(power.comparison.id for power in powers if not power.protects)
    return SelfTest(tuple(powers), find_blind_spots(judgement.comparisons, candidate, blind))


def inject_faults(tensor_id: TensorId, candidate: Trace) -> Iterator[tuple[str, list[Shard]]]:
    """Yield every fault that this tensor can have, with the changed shards."""
    shards = candidate.shards[tensor_id]
    for name, injection in INJECTIONS.items():
        wrong = injection(tensor_id, shards, candidate)
        if wrong is not None and any(
            not torch.equal(a.tensor(), b.tensor()) for a, b in zip(shards, wrong, strict=True)
        ):
            yield name, wrong


def _scale_by(factor: float) -> Injection:
    def injection(_id: TensorId, shards: list[Shard], _candidate: Trace) -> list[Shard] | None:
        if not shards[0].record.dtype.is_floating_point:
            return None
        # Not rounded back: in bf16 a factor of 1.001 would vanish, or become twice as large.
        return [_replace_values(shard, shard.tensor().to(torch.float64) * factor) for shard in shards]

    return injection


def _lose_shard(_id: TensorId, shards: list[Shard], _candidate: Trace) -> list[Shard]:
    """Set the last rank's part to zero."""
    last = shards[-1].coord.rank
    return [_replace_values(s, torch.zeros_like(s.tensor())) if s.coord.rank == last else s for s in shards]


def _swap_chunks(tensor_id: TensorId, shards: list[Shard], candidate: Trace) -> list[Shard] | None:
    """Exchange two ranks' chunks or, if there are no two, the two halves of each shard."""
    logical = LogicalTensor.of(candidate, tensor_id)
    pieces = logical.pieces if logical else ()
    if len(pieces) > 1 and pieces[0].region.local_shape == pieces[1].region.local_shape:
        values = {pieces[i].region: pieces[1 - i].summands[0][0].tensor() for i in (0, 1)}
        return [_replace_values(s, values[s.record.region]) if s.record.region in values else s for s in shards]
    dim = max(range(len(shards[0].record.shape)), key=lambda i: shards[0].record.shape[i], default=None)
    if dim is None:
        return None
    return [_replace_values(shard, shard.tensor().roll(shard.record.shape[dim] // 2, dim)) for shard in shards]


def _zero_row(_id: TensorId, shards: list[Shard], _candidate: Trace) -> list[Shard] | None:
    """Set a row of median size to zero, in the first shard and its replicas."""
    first = shards[0].tensor()
    if first.ndim == 0 or first.numel() == 0:
        return None
    sizes = first.to(torch.float64).reshape(len(first), -1).norm(dim=1)
    used = sizes.nonzero().flatten()
    if not len(used):
        return None
    row = used[sizes[used].argsort()[len(used) // 2]]
    region = shards[0].record.region
    return [_replace_values(s, s.tensor().index_fill(0, row, 0)) if s.record.region == region else s for s in shards]


def _take_neighbour(tensor_id: TensorId, shards: list[Shard], candidate: Trace) -> list[Shard] | None:
    """Take the values of the next microbatch, or of the previous one."""
    for step in (1, -1):
        if tensor_id.microbatch is None or tensor_id.microbatch + step < 0:
            continue
        others = candidate.shards.get(tensor_id._replace(microbatch=tensor_id.microbatch + step), [])
        if [s.record.shape for s in others] == [s.record.shape for s in shards]:
            return [_replace_values(shard, other.tensor()) for shard, other in zip(shards, others, strict=True)]
    return None


def _replace_values(shard: Shard, values: torch.Tensor) -> Shard:
    return Altered(shard.record, shard.coord, shard.rank, values)


LOST_SHARD = "one rank's part lost"
INJECTIONS: Mapping[str, Injection] = {
    "scaled by 1.01": _scale_by(1.01),
    "scaled by 1.001": _scale_by(1.001),
    LOST_SHARD: _lose_shard,
    "chunks swapped": _swap_chunks,
    "a row zeroed": _zero_row,
    "another microbatch": _take_neighbour,
}
