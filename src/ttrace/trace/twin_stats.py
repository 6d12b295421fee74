"""Stats of a run measured against another one while it runs, so that its tensors need not be stored.

A twin is compared with its reference only, tensor by tensor, so a few sums over each pair are enough. The values of
twins would take several times the space of the two sides that a check compares.

Two things need more than one tensor. An update is the difference of a parameter after and before its step. And
noise-dominated elements, whose gradient is within its own rounding error, are left out of what an optimizer makes of
it, because rounding alone decides their update. For this, each run uses the error of its own gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.layouts.region import Region
from ttrace.trace.format import Record, rank_folder
from ttrace.trace.rank import RankTrace
from ttrace.trace.store import Place, Remote
from ttrace.values.chunks import CHUNK, Bounds
from ttrace.values.kernels.pair import Term
from ttrace.values.stats import Stats, compare_sums, measure_rms

NOISE_DOMINATED = 4.0
"""An element is noise-dominated if its gradient is at most this many times its gradient's rounding error.

This is the margin of a gradient's tolerance (docs/decisions/0003-lost-elements.md).
"""
_BESIDE_UPDATES = (Kind.PARAM, Kind.PARAM_AFTER)
NO_INDICES = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Measured:
    """A record with its stats, and the flat indices of elements that are zero in the other run only."""

    record: Record
    indices: torch.Tensor = NO_INDICES


@dataclass(frozen=True)
class _Gradient:
    """A final gradient of the other run, which marks the noise-dominated elements of its parameter."""

    record: Record
    limit: float
    """Elements up to this size are within their rounding error."""
    indices: torch.Tensor
    """The elements that are zero in the other run, and not in this one."""


class Counterpart:
    """The other run's trace, as the same rank wrote it."""

    def __init__(self, rank: RankTrace, is_stored: Callable[[Site], bool] = lambda _: False) -> None:
        """Set up the counterpart in `rank`; tensors for which `is_stored` returns True are stored all the same."""
        self._rank = rank
        self._is_stored = is_stored
        self._gradients: dict[str, list[_Gradient]] = {}
        self._equal_parameters: set[tuple[TensorId, Region | None]] = set()
        """The parameters that are equal in both runs, before the first step."""

    @classmethod
    def find(cls, folder: Place | None, rank: int, is_stored: Callable[[Site], bool]) -> Counterpart | None:
        """Find the other run's trace; None if there is none, or if it would have to be fetched from a store."""
        if folder is None or isinstance(folder, Remote):
            return None
        return cls(RankTrace(folder / rank_folder(rank)), is_stored)

    @property
    def launch(self) -> str:
        """The launch that wrote the other run's trace."""
        return self._rank.manifest.launch

    def can_measure(self, record: Record) -> bool:
        """Whether the other run has a matching record that needs no further summation."""
        tensor_id, other = record.id, self._find(record)
        if other is None or self._must_be_stored(tensor_id):
            return False
        is_alone = self._rank.manifest.num_ranks == 1
        if not (_is_whole_sketch(record, other) if is_alone else record.sketch is other.sketch is None):
            return False
        is_summed = bool(record.pending) if not is_alone else MICROBATCH_AXIS in record.pending
        is_like = (other.shape, other.dtype, other.pending) == (record.shape, record.dtype, record.pending)
        if is_summed or not is_like or (record.region is None and not is_alone):
            return False
        if tensor_id.kind in _BESIDE_UPDATES and not self._has_update(record):
            return False
        return bool(self._find_gradients(record)) or not self._list_gradients(record)

    def measure(self, record: Record, parts: Iterable[memoryview]) -> Iterator[Measured]:
        """Measure a record for which `can_measure` is True; a parameter's update follows the parameter after it."""
        other = self._find(record)
        assert other is not None
        if record.id.kind is Kind.PARAM_AFTER:
            before = self._records.get((record.id.at(Kind.PARAM), record.microbatch, record.region))
            is_equal = before is not None and (before.id, before.region) in self._equal_parameters
            yield from self._measure_step(record, other, before if is_equal else None, parts)
            return
        if record.id.kind is Kind.PARAM_GRAD and record.id.microbatch is None and record.sketch is None:
            yield self._measure_gradient(record, other, parts)
            return
        stats = self._compare(record, other, parts)
        if record.id.kind is Kind.PARAM and stats.dd == 0.0 and stats.finite_a and stats.finite_b:
            self._equal_parameters.add((other.id, other.region))
        yield _finish(record, stats)

    def _has_update(self, record: Record) -> bool:
        """Whether a parameter's update can be measured, if it has one.

        In later steps it cannot: the parameter before the step differs from the other run's, and was not stored. It
        cannot be measured either if a rank updates only a part of what it holds, or has the gradient of another part.
        """
        tensor_id = record.id
        kind = Kind.PARAM_AFTER if tensor_id.kind is Kind.PARAM else Kind.PARAM
        beside, gradients = (self._regions.get(tensor_id.at(each), []) for each in (kind, Kind.PARAM_GRAD))
        is_like = record.region in beside and (not gradients or record.region in gradients)
        return not beside or (tensor_id.step == 0 and is_like)

    def _must_be_stored(self, tensor_id: TensorId) -> bool:
        """Whether this tensor is stored; an update needs the parameter before and after its step."""
        site = tensor_id.site
        sites = [tensor_id.at(kind).site for kind in _BESIDE_UPDATES] if site.kind in _BESIDE_UPDATES else [site]
        return any(map(self._is_stored, sites))

    def _compare(self, record: Record, other: Record, parts: Iterable[memoryview]) -> Stats:
        """Compare two tensors, part by part."""
        reference, total = self._read(other), Stats()
        gradients = self._find_gradients(record)
        for begin, values in _cut(parts, record):
            run = begin, begin + values.numel()
            total = total + self._compare_run([(1.0, reference[slice(*run)])], [(1.0, values)], gradients, run)
        self._rank.release(other)
        return total

    def _measure_step(
        self, record: Record, other: Record, before: Record | None, parts: Iterable[memoryview]
    ) -> Iterator[Measured]:
        """Measure a parameter after its step, and the step, if the parameter before it is known."""
        reference, start = self._read(other), self._read(before) if before is not None else None
        after, step = Stats(), Stats()
        gradients = self._find_gradients(record)
        for begin, values in _cut(parts, record):
            run = begin, begin + values.numel()
            x, y = (1.0, reference[slice(*run)]), (1.0, values)
            after = after + self._compare_run([x], [y], gradients, run)
            if start is not None:
                from_start = (-1.0, start[slice(*run)])
                step = step + self._compare_run([x, from_start], [y, from_start], gradients, run)
        yield _finish(record, after)
        if before is not None:
            yield _finish(replace(record, id=record.id.at(Kind.UPDATE)), step)
            self._rank.release(before)
        self._rank.release(other)

    def _measure_gradient(self, record: Record, other: Record, parts: Iterable[memoryview]) -> Measured:
        """Measure a gradient, and remember which elements of its parameter are noise-dominated."""
        reference, total, newly_nonzero = self._read(other), Stats(), [NO_INDICES]
        for begin, values in _cut(parts, record):
            there = reference[begin : begin + values.numel()]
            total = total + compare_sums([(1.0, there)], [(1.0, values)])
            newly_nonzero += _find_newly_nonzero(there, values, begin)
        self._rank.release(other)
        indices = torch.cat(newly_nonzero)
        error = max(total.error, torch.finfo(record.dtype).eps / 2 if record.dtype.is_floating_point else 0.0)
        limit = NOISE_DOMINATED * error * measure_rms(total.aa, total.count)
        self._gradients.setdefault(record.id.name, []).append(_Gradient(other, limit, indices))
        return replace(_finish(record, total), indices=indices)

    def _list_gradients(self, record: Record) -> Sequence[_Gradient]:
        """List the gradients that mark noise-dominated elements of a record; a sketch leaves no elements out."""
        is_asked = record.id.is_of_update and record.sketch is None
        return self._gradients.get(record.id.name, ()) if is_asked else ()

    def _find_gradients(self, record: Record) -> Sequence[_Gradient]:
        """Find the gradients of the same region: a rank may hold several parts of a tensor."""
        return [gradient for gradient in self._list_gradients(record) if gradient.record.region == record.region]

    def _compare_run(
        self, xs: list[Term], ys: list[Term], gradients: Iterable[_Gradient], run: tuple[int, int]
    ) -> Stats:
        """Compare a run of the flat tensors, without the elements that are noise-dominated by their gradients."""
        known = [(gradient, self._read(gradient.record)) for gradient in gradients]

        def mark_noise(bounds: Bounds) -> torch.Tensor:
            ((start, stop),) = bounds
            begin, end = run[0] + start, run[0] + stop
            mask = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
            for gradient, values in known:
                here = values[begin:end]
                mask |= (here.abs() <= gradient.limit) & (here != 0)
                is_here = (gradient.indices >= begin) & (gradient.indices < end)
                mask[gradient.indices[is_here] - begin] = True
            return mask

        return compare_sums(xs, ys, mark_noise if known else None)

    def _read(self, record: Record) -> torch.Tensor:
        """Read the other run's tensor, flat. It is not verified: a check reads it too, and refuses it if damaged."""
        return _widen(self._rank.read_unverified(record).reshape(-1))

    def _find(self, record: Record) -> Record | None:
        return self._records.get((record.id, record.microbatch, record.region))

    @cached_property
    def _regions(self) -> dict[TensorId, list[Region | None]]:
        regions: dict[TensorId, list[Region | None]] = {}
        for record in self._rank.records:
            regions.setdefault(record.id, []).append(record.region)
        return regions

    @cached_property
    def _records(self) -> dict[tuple[TensorId, int, Region | None], Record]:
        return {(record.id, record.microbatch, record.region): record for record in self._rank.records}


def _is_whole_sketch(record: Record, other: Record) -> bool:
    """Whether both are recorded in full, or both as sketches of whole tensors: those of parts must be added up."""
    if record.sketch is None or other.sketch is None:
        return record.sketch is other.sketch
    is_whole = record.region is not None and record.region.local_shape == record.region.shape
    return is_whole and record.sketch.num_buckets == other.sketch.num_buckets


def _find_newly_nonzero(reference: torch.Tensor, values: torch.Tensor, begin: int) -> Iterator[torch.Tensor]:
    """Find what is zero in the other run only, chunk by chunk: most rows of a vocabulary are zero in both."""
    for start in range(0, reference.numel(), CHUNK):
        mask = (reference[start : start + CHUNK] == 0).logical_and_(values[start : start + CHUNK])
        if mask.any():
            yield mask.nonzero().flatten() + begin + start


def _finish(record: Record, stats: Stats) -> Measured:
    if record.sketch is not None:
        stats = replace(stats, count=math.prod(record.shape))
    return Measured(replace(record, stats=stats))


def _cut(parts: Iterable[memoryview], record: Record) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield parts as flat tensors, each with the index of its first element."""
    at, dtype = 0, record.stored_form[1]
    for part in parts:
        if len(part):
            tensor = torch.frombuffer(part, dtype=dtype)
            yield at, _widen(tensor)
            at += tensor.numel()


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Convert float8 to float32: torch does not compare float8."""
    is_narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.to(torch.float32) if is_narrow else tensor
