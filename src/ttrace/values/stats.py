"""Difference of two tensors, measured in one pass as sums that add up over shards.

Totals are kept in float64 whatever the dtype: float32 sums are off by a percent at 10^8 elements and overflow at 1e30.
The C kernels measure tensors in memory, strided ones where they lie; torch measures the rest, chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace

import torch

from ttrace.values.chunks import Bounds, cut_chunks
from ttrace.values.kernels.library import Kernels, choose_kernels, is_readable
from ttrace.values.kernels.pair import Term, measure_pair


@dataclass(frozen=True)
class Stats:
    """Sums over the elements of two tensors; `a` is the reference. Non-finite elements are counted, not summed."""

    count: int = 0
    aa: float = 0.0
    bb: float = 0.0
    dd: float = 0.0
    ab: float = 0.0
    max_diff: float = 0.0
    max_at: tuple[int, ...] | None = None
    nan_a: int = 0
    inf_a: int = 0
    nan_b: int = 0
    inf_b: int = 0

    def __add__(self, other: Stats) -> Stats:
        """Add two parts; `max_at` is that of the larger difference, so both must use the same coordinates."""
        if not (self.count and other.count):  # most sums are of one part
            return self if self.count else other
        larger = other if other.max_diff > self.max_diff else self
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return Stats(**sums, max_diff=larger.max_diff, max_at=larger.max_at)

    @property
    def error(self) -> float:
        """||a - b|| / ||a||: 0 for two zeros, infinite if only the reference is zero or a side is not finite."""
        is_finite = not (self.nan_a or self.inf_a or self.nan_b or self.inf_b)
        if not (is_finite and math.isfinite(self.aa + self.bb)):
            return math.inf
        if self.aa == 0.0:
            return 0.0 if self.bb == 0.0 else math.inf
        return math.sqrt(self.dd / self.aa)

    @property
    def scale(self) -> float:
        """<a, b> / <a, a>: the factor f for which f * a is closest to b."""
        return self.ab / self.aa if self.aa else math.nan

    @property
    def norm(self) -> float:
        return math.sqrt(self.aa)

    @property
    def finite_a(self) -> bool:
        return not (self.nan_a or self.inf_a)

    @property
    def finite_b(self) -> bool:
        return not (self.nan_b or self.inf_b)


_SUMS = ("count", "aa", "bb", "dd", "ab", "nan_a", "inf_a", "nan_b", "inf_b")


def measure_difference(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, num_threads: int = 1) -> Stats:
    """Measure b x factor against a; `max_at` is an index into a, of one of its largest differences."""
    if num_threads > 1 and a.numel() >= _WORTH_A_THREAD and a.shape == b.shape:
        return _measure_in_threads(a, b, factor, num_threads)
    return measure_sums([(1.0, a)], [(factor, b)])


def measure_sums(xs: Sequence[Term], ys: Sequence[Term]) -> Stats:
    """Measure one sum of tensors against another; neither sum is ever in memory as a whole."""
    (_, first), *others = (*xs, *ys)
    for _, other in others:
        if other.shape != first.shape:
            raise ValueError(f"cannot compare shapes {tuple(first.shape)} and {tuple(other.shape)}")
    library = choose_kernels() if all(is_readable(tensor) for _, tensor in (*xs, *ys)) else None
    return _measure_with_torch(xs, ys) if library is None else _measure_with_kernels(library, xs, ys)


_WORTH_A_THREAD = 1 << 20


def _measure_in_threads(a: torch.Tensor, b: torch.Tensor, factor: float, num_threads: int) -> Stats:
    """Measure parts along the longest dim, one per thread; the first part in this thread."""
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    first, *others = zip(a.tensor_split(num_threads, dim), b.tensor_split(num_threads, dim), strict=True)
    with ThreadPoolExecutor(num_threads - 1) as pool:
        # The copied context says which kernels the caller chose.
        waiting = [pool.submit(copy_context().run, measure_difference, x, y, factor=factor) for x, y in others]
        total, start = measure_difference(*first, factor=factor), first[0].shape[dim]
        for (x, _), part in zip(others, waiting, strict=True):
            total, start = total + _shift(part.result(), dim, start), start + x.shape[dim]
    return total


def _shift(part: Stats, dim: int, by: int) -> Stats:
    if part.max_at is None:
        return part
    return replace(part, max_at=tuple(i + by if d == dim else i for d, i in enumerate(part.max_at)))


def _measure_with_kernels(library: Kernels, xs: Sequence[Term], ys: Sequence[Term]) -> Stats:
    numel = xs[0][1].numel()
    if not numel:
        return Stats()
    sums, at = measure_pair(library, xs, ys)
    bad = (sums.nan_a, sums.inf_a, sums.nan_b, sums.inf_b)
    return Stats(numel, sums.aa, sums.bb, sums.dd, sums.ab, sums.max_diff, at, *bad)


def _measure_with_torch(xs: Sequence[Term], ys: Sequence[Term]) -> Stats:
    total = Stats()
    for cut in cut_chunks(tuple(xs[0][1].shape)):
        # Strided shards are read in place.
        where = tuple(slice(*run) for run in cut)
        total = total + _locate(_measure_chunk(_add_terms(xs, where), _add_terms(ys, where)), cut)
    return total


def _add_terms(terms: Sequence[Term], where: tuple[slice, ...]) -> torch.Tensor:
    """Add up one part of all terms, flattened."""
    total: torch.Tensor | None = None
    for factor, tensor in terms:
        part = tensor[where].to(torch.float64).reshape(-1)
        part = part if factor == 1.0 else part * factor
        total = part if total is None else total + part
    assert total is not None, "a sum has a term"
    return total


def _locate(part: Stats, cut: Bounds) -> Stats:
    """Turn the flat position of a chunk's largest difference into an index of the whole tensor."""
    if part.max_at is None:
        return part
    at, index = part.max_at[0], []
    for start, stop in reversed(cut):
        at, i = divmod(at, stop - start)
        index.append(start + i)
    return replace(part, max_at=tuple(reversed(index)))


def _measure_chunk(x: torch.Tensor, y: torch.Tensor) -> Stats:
    diff = x - y
    total = float(diff.dot(diff))
    bad = {}
    if not math.isfinite(total):
        bad = {"nan_a": x.isnan(), "inf_a": x.isinf(), "nan_b": y.isnan(), "inf_b": y.isinf()}
        good = x.isfinite() & y.isfinite()
        x, y = torch.where(good, x, 0.0), torch.where(good, y, 0.0)
        diff = x - y
        total = float(diff.dot(diff))
    size = diff.abs_()
    at = int(size.argmax())
    biggest = float(size[at])
    return Stats(
        count=x.numel(),
        aa=float(x.dot(x)),
        bb=float(y.dot(y)),
        dd=total,
        ab=float(x.dot(y)),
        max_diff=biggest,
        max_at=(at,) if biggest > 0 else None,
        **{name: int(mask.sum()) for name, mask in bad.items()},
    )
