"""Values of logical tensors, read block by block: a tensor of 10^9 elements is never in memory as a whole.

Besides reading, this module has what causes need over all rows of a tensor: sums, projections, and `match_rows`, which
finds the row of the reference that a row of the candidate holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.layouts import ranges as rg
from ttrace.layouts.region import Region, Shape, ravel_index
from ttrace.values.chunks import Bounds, cut_chunks
from ttrace.values.kernels.pair import Term
from ttrace.values.sketch import compute_sketch
from ttrace.values.stats import LEAST_DIVISOR, add_terms

BLOCK = 1 << 20
"""The number of elements in a block, each a float64."""
MOST_ROWS = 1 << 20
"""A dim of more indices is not examined index by index; no vocabulary is larger. Chosen, not measured."""
_FEW_ELEMENTS = 1 << 22
_MANY_DIRECTIONS, _FEW_DIRECTIONS = 64, 16
"""The number of directions for tensors of at most, and of more than, _FEW_ELEMENTS. Chosen, not measured."""
_AT_ONCE = 1 << 23
"""The number of distances that are measured at once."""
_MOST_PAIRS = 1 << 24
"""With more pairs of rows, a sample of the rows must be matched first."""
_SAMPLE = 256
_MOST_SHIFTS = 4
"""The number of rows in that sample, and of the most frequent shifts in it that are tried on all rows."""


class Values:
    """The values of a logical tensor times a factor, in float64. Files stay mapped: only what is asked for is read."""

    def __init__(self, tensor: LogicalTensor | torch.Tensor, factor: float = 1.0) -> None:
        """Set up for a logical tensor, or for a few numbers that are in memory."""
        self.shape: Shape = tuple(tensor.shape)
        self.count = math.prod(self.shape)
        parts: list[tuple[Region, Sequence[Term]]]
        if isinstance(tensor, torch.Tensor):
            parts = [(Region.whole(self.shape), [(1.0, tensor)])]
        else:
            parts = [(piece.region, piece.terms()) for piece in tensor.pieces]
        self._parts = [(region, [(factor * sign, term) for sign, term in terms]) for region, terms in parts]

    @classmethod
    def of_sketch(cls, tensor: LogicalTensor, num_buckets: int, factor: float = 1.0) -> Values:
        """Use the numbers of a sketch as values: sketches add and subtract as their tensors do."""
        return cls(tensor.sketched(num_buckets), factor)

    @classmethod
    def of_numbers(cls, numbers: torch.Tensor, factor: float = 1.0) -> Values:
        """Use a few numbers that are in memory as values."""
        return cls(numbers, factor)

    def read(self, bounds: Bounds) -> torch.Tensor:
        """Read a block."""
        return self.read_region(self.make_region(bounds))

    def make_region(self, bounds: Bounds) -> Region:
        return Region(self.shape, tuple((run,) for run in bounds))

    def read_rows(self, bounds: Bounds, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Read a block with these indices of one dim, in this order, in place of its own."""
        needed, order = rows.unique(return_inverse=True)
        runs = (rg.from_indices(needed) if number == dim else (run,) for number, run in enumerate(bounds))
        return self.read_region(Region(self.shape, tuple(runs))).index_select(dim, order)

    def spread_index(self, most: int = BLOCK) -> torch.Tensor:
        """Return the row-major indices of about `most` evenly spread elements, or of all if there are no more."""
        # An odd distance: widths are multiples of powers of two, and an even one would hit few columns.
        return torch.arange(0, self.count, max(self.count // most, 1) | 1, device="cpu")

    def read_elements(self, index: torch.Tensor) -> torch.Tensor:
        """Read single elements by their row-major index."""
        result = torch.zeros(index.shape, dtype=torch.float64, device="cpu")
        for region, terms in self._parts:
            at = region.find_positions(index)
            held = at >= 0
            for sign, term in terms:
                result[held] += sign * term.reshape(-1)[at[held]].to(torch.float64)
        return result

    @property
    def is_one_block(self) -> bool:
        return self.count <= BLOCK

    def cut(self, rows: tuple[int, int] | None = None) -> Iterator[Bounds]:
        """Cut the tensor, or some indices of its first dim, into blocks, which come in row-major order."""
        if not self.shape:
            yield ()
            return
        start, stop = rows or (0, self.shape[0])
        for (first, end), *rest in cut_chunks((stop - start, *self.shape[1:]), BLOCK):
            yield ((first + start, end + start), *rest)

    def read_region(self, region: Region) -> torch.Tensor:
        """Read a region of the logical tensor."""
        result: torch.Tensor | None = None
        for held, terms in self._parts:
            for ours, theirs in region.overlaps(held):
                part = add_terms([(sign, theirs.of(term)) for sign, term in terms], (...,))
                part = part.to(torch.float64, copy=len(terms) == 1)  # the file's own memory is never changed
                if ours.is_in_order and part.shape == region.local_shape:
                    return part
                if result is None:
                    result = torch.zeros(region.local_shape, dtype=torch.float64, device="cpu")
                ours.assign(result, part)
        return torch.zeros(region.local_shape, dtype=torch.float64, device="cpu") if result is None else result


@dataclass(frozen=True)
class RowSums:
    """Sums over all elements of each index of one dim: squares of both sides, products, and squares of differences."""

    aa: torch.Tensor
    bb: torch.Tensor
    ab: torch.Tensor
    dd: torch.Tensor


def sum_rows(a: Values, b: Values) -> dict[int, RowSums]:
    """Sum over the indices of every dim in one pass; a dim of too many indices is left out."""
    dims = [dim for dim, size in enumerate(a.shape) if size <= MOST_ROWS]
    sums = {dim: torch.zeros(4, a.shape[dim], dtype=torch.float64, device="cpu") for dim in dims}
    for bounds in a.cut():
        x, y = a.read(bounds), b.read(bounds)
        for number, products in enumerate((x * x, y * y, x * y, (y - x).square_())):
            for dim in dims:
                sums[dim][number, slice(*bounds[dim])] += (
                    products.movedim(dim, 0).reshape(len_of(bounds, dim), -1).sum(1)
                )
    return {dim: RowSums(*found) for dim, found in sums.items()}


def len_of(bounds: Bounds, dim: int) -> int:
    """Return the number of indices of a dim in a block."""
    return bounds[dim][1] - bounds[dim][0]


def measure_common_row(a: Values, b: Values) -> tuple[torch.Tensor, float]:
    """Measure the mean difference along the last dim, and the error that is left without it."""
    width = a.shape[-1]
    row = torch.zeros(width, dtype=torch.float64, device="cpu")
    for bounds in a.cut():
        row[slice(*bounds[-1])] += (b.read(bounds) - a.read(bounds)).reshape(-1, len_of(bounds, -1)).sum(0)
    row /= a.count // width
    rest = norm = 0.0
    for bounds in a.cut():
        ours = a.read(bounds)
        rest += float((b.read(bounds) - ours - row[slice(*bounds[-1])]).square().sum())
        norm += float(ours.square().sum())
    return row, math.sqrt(rest / max(norm, LEAST_DIVISOR))


def sketch_rows(row: torch.Tensor, shape: Shape, num_buckets: int) -> torch.Tensor:
    """Sketch a tensor of this shape whose vectors along the last dim all are this row."""
    total = torch.zeros(num_buckets, dtype=torch.float64, device="cpu")
    for bounds in cut_chunks(shape, BLOCK):
        region = Region(shape, tuple((run,) for run in bounds))
        total += compute_sketch(row[slice(*bounds[-1])].expand(region.local_shape).contiguous(), region, num_buckets)
    return total


def count_directions(count: int) -> int:
    """Return the number of directions on which the rows of a tensor of `count` elements are projected."""
    return _MANY_DIRECTIONS if count <= _FEW_ELEMENTS else _FEW_DIRECTIONS


def project(values: Values, dim: int, num_directions: int) -> torch.Tensor:
    """Project the slice of each index of a dim on some directions.

    Equal slices stay equal, and distances nearly the same. The directions are products of one vector for each other
    dim. Slices of few enough elements stay as they are.
    """
    others = [number for number in range(len(values.shape)) if number != dim]
    size, width = values.shape[dim], values.count // values.shape[dim]
    if width <= num_directions:
        rows = torch.empty(values.shape, dtype=torch.float64, device="cpu")
        for bounds in values.cut():
            rows[tuple(slice(*run) for run in bounds)] = values.read(bounds)
        return rows.movedim(dim, 0).reshape(size, width)
    result = torch.zeros(size, num_directions, dtype=torch.float64, device="cpu")
    others.sort(key=lambda number: values.shape[number])  # the largest first, so that what is left is small
    for bounds in values.cut():
        block = values.read(bounds).permute(dim, *others)
        *rest, largest = others
        left = block @ _draw_directions(largest, values.shape[largest], num_directions)[slice(*bounds[largest])]
        for number in reversed(rest):
            factors = _draw_directions(number, values.shape[number], num_directions)[slice(*bounds[number])]
            left = (left * factors).sum(-2)
        result[slice(*bounds[dim])] += left
    return result


def project_product(g: Values, x: Values, num_directions: int) -> torch.Tensor:
    """Project the rows of g.T @ x, whose rows and columns are the last dims of both, without computing it."""
    tokens = project_last(x, num_directions)
    result = torch.zeros(g.shape[-1], tokens.shape[1], dtype=torch.float64, device="cpu")
    for bounds in g.cut():
        columns, rows = _locate_vectors(bounds, g.shape)
        result[columns] += g.read(bounds).reshape(-1, len_of(bounds, -1)).T @ tokens[rows]
    return result


def project_last(values: Values, num_directions: int) -> torch.Tensor:
    """Project every vector along the last dim, in row-major order. Short ones stay as they are."""
    width = values.shape[-1]
    if width <= num_directions:
        directions = torch.eye(width, dtype=torch.float64, device="cpu")
    else:
        directions = _draw_directions(0, width, num_directions)
    result = torch.zeros(values.count // width, directions.shape[1], dtype=torch.float64, device="cpu")
    for bounds in values.cut():
        columns, rows = _locate_vectors(bounds, values.shape)
        result[rows] += values.read(bounds).reshape(-1, len_of(bounds, -1)) @ directions[columns]
    return result


def _locate_vectors(bounds: Bounds, shape: Shape) -> tuple[slice, slice]:
    """Return a block's part of the last dim, and the numbers of its vectors along that dim."""
    first = ravel_index([start for start, _ in bounds[:-1]], shape[:-1])
    num_vectors = math.prod(stop - start for start, stop in bounds[:-1])
    return slice(*bounds[-1]), slice(first, first + num_vectors)


@functools.lru_cache(maxsize=8)
def _draw_directions(seed: int, size: int, num_directions: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, num_directions, dtype=torch.float64, device="cpu", generator=generator)


def find_nearest(queries: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the row that is nearest to each query, and how far it is."""
    nearest = [torch.cdist(part, rows).min(1).indices for part in queries.split(max(_AT_ONCE // len(rows), 1))]
    index = torch.cat(nearest) if nearest else torch.zeros(0, dtype=torch.int64, device="cpu")
    return index, (rows[index] - queries).norm(
        dim=1
    )  # again, because cdist's product of matrices is inexact for small distances


def match_rows(ours: torch.Tensor, theirs: torch.Tensor, least: float, ratio: float) -> torch.Tensor:
    """Find for every row of the candidate the row of the reference that it equals most.

    This is its own row, unless the distance to another row is less than `ratio` times the distance to its own: equal
    rows are not a movement. A row of zeros matches no other row. With many rows, rows whose error is at most `least`
    are skipped.
    """
    source = torch.arange(len(ours), device="cpu")
    own = (ours - theirs).norm(dim=1)
    wrong = ((own > 0) & theirs.any(1)).nonzero().flatten()
    if len(wrong) * len(ours) > _MOST_PAIRS:
        far = wrong[own[wrong] > least]
        sample = far[:: max(len(far) // _SAMPLE, 1)]
        nearest, distance = find_nearest(theirs[sample], ours)
        is_found = distance < ratio * own[sample]
        if 2 * int(is_found.sum()) < len(sample):
            return source  # too many rows match no row
        shifts, counts = (sample - nearest)[is_found].unique(return_counts=True)
        for shift in shifts[counts.argsort(descending=True)[:_MOST_SHIFTS]].tolist():
            wrong = _shift_rows(source, ours, theirs, own, wrong, shift, ratio)
        wrong = wrong[own[wrong] > least]
    nearest, distance = find_nearest(theirs[wrong], ours)
    is_found = distance < ratio * own[wrong]
    source[wrong[is_found]] = nearest[is_found]
    return source


def _shift_rows(
    source: torch.Tensor,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    own: torch.Tensor,
    wrong: torch.Tensor,
    shift: int,
    ratio: float,
) -> torch.Tensor:
    """Match those rows that equal the row `shift` rows before them; return the others."""
    before = (wrong - shift) % len(ours)
    is_found = (ours[before] - theirs[wrong]).norm(dim=1) < ratio * own[wrong]
    source[wrong[is_found]] = before[is_found]
    return wrong[~is_found]
