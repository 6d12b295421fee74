"""Difference of two tensors, measured in one pass as sums that add up over shards.

Totals are kept in float64 whatever the dtype: float32 sums are off by a percent at 10^8 elements and overflow at 1e30.
The C kernels measure tensors in memory, without copying strided ones; torch measures the rest, chunk by chunk.
`measure_*` only add up. `compare_*` also treat infinities in the same place as equal, and can ignore some elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch

from ttrace.values.chunks import Bounds, cut_chunks
from ttrace.values.kernels.choice import choose_kernels
from ttrace.values.kernels.library import Kernels, is_readable
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


LEAST_DIVISOR = 1e-300
"""What a norm or a sum of squares is divided by is at least this, so that nothing is divided by zero."""

ChunkMask = Callable[[Bounds], torch.Tensor]
"""Marks the elements of a chunk that a comparison leaves out."""


def measure_rms(squares: float, count: int) -> float:
    """Return the root mean square of numbers, from the sum of their squares; 0 of none."""
    return math.sqrt(squares / max(count, 1))


def has_few_values(data: torch.Tensor) -> bool:
    """Whether floats have few distinct values and are not constant, as 0/1 masks, additive masks and classes."""
    is_sortable = data.dtype in _SORTABLE and data.layout is torch.strided and not data.is_nested
    if not is_sortable or data.numel() < _LEAST_MASK:
        return False
    numbers = data.detach().reshape(-1)
    sample = numbers[:: -(-len(numbers) // _NUM_SAMPLES)]  # sorting all of an image takes long
    return len(sample.unique()) <= _FEW_VALUES and 1 < len(numbers.unique()) <= _FEW_VALUES


_SORTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LEAST_MASK = 64
"""Fewer floats have few distinct values by chance."""
_FEW_VALUES = 16
"""A mask has at most so many values; measurements have far more, even if they are rounded to bf16."""
_NUM_SAMPLES = 1 << 12
_SUMS = ("count", "aa", "bb", "dd", "ab", "nan_a", "inf_a", "nan_b", "inf_b")
_WORTH_A_THREAD = 1 << 20
"""Smaller tensors are measured in one thread."""


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


def compare_sums(xs: Sequence[Term], ys: Sequence[Term], find_ignored: ChunkMask | None = None) -> Stats:
    """Compare two sums of tensors of one shape: in place, or chunk by chunk if some elements are ignored.

    As in `compare_pair`, infinities in the same place are equal.
    """
    if find_ignored is None:
        total = measure_sums(xs, ys)
        if not (total.inf_a and total.inf_b):
            return total
    total = Stats()
    for cut in cut_chunks(tuple(xs[0][1].shape)):
        where = tuple(slice(*run) for run in cut)
        x, y = add_terms(xs, where), add_terms(ys, where)
        if find_ignored is not None:
            ignored = find_ignored(cut)
            x, y = x.masked_fill(ignored, 0), y.masked_fill(ignored, 0)
        part = compare_pair(x, y)
        if part.max_at is not None:
            at = tuple(start + i for (start, _), i in zip(cut, part.max_at, strict=True))
            part = replace(part, max_at=at)
        total = total + part
    return total


def compare_pair(x: torch.Tensor, y: torch.Tensor, *, factor: float = 1.0) -> Stats:
    """Compare y x factor with x. Infinities in the same place are equal: attention masks contain many of them."""
    stats = measure_difference(x, y, factor=factor)
    if not (stats.inf_a and stats.inf_b):
        return stats
    same = x.isinf() & (x == y)
    return measure_difference(x.masked_fill(same, 0), y.masked_fill(same, 0), factor=factor)


def add_terms(terms: Sequence[Term], where: tuple[Any, ...]) -> torch.Tensor:
    """Add up a part of all terms: in float64, if it is more than one tensor."""
    (factor, first), *others = terms
    if factor == 1.0 and not others:
        return first[where]
    total = first[where].to(torch.float64) * factor
    for factor, term in others:
        total = torch.add(total, term[where].to(torch.float64), alpha=factor)
    return total


def _measure_in_threads(a: torch.Tensor, b: torch.Tensor, factor: float, num_threads: int) -> Stats:
    """Measure parts along the longest dim, one per thread; the first part in this thread."""
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    first, *others = zip(a.tensor_split(num_threads, dim), b.tensor_split(num_threads, dim), strict=True)
    with ThreadPoolExecutor(num_threads - 1) as pool:
        # The copied context holds the choice of kernels.
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
        # A slice of a strided shard is a view, so only the chunk is copied.
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
