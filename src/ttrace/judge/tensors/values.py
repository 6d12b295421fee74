"""Values of logical tensors, read block by block: one of 10^9 elements is never in memory as a whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.layouts.region import Region, Shape, ravel_index
from ttrace.tensors import ranges as rg
from ttrace.values.chunks import Bounds, cut_chunks
from ttrace.values.compare import add_terms
from ttrace.values.sketch import compute_sketch

BLOCK = 1 << 20
"""Elements in a block, each a float64."""
MOST_ROWS = 1 << 20
"""Of a dim whose indices are looked at one by one; no vocabulary is larger."""
_FEW_ELEMENTS = 1 << 22
_MANY_DIRECTIONS, _FEW_DIRECTIONS = 64, 16


class Values:
    """The values of a logical tensor times a factor, in float64. Files stay mapped: only what is asked for is read."""

    def __init__(self, tensor: LogicalTensor, factor: float = 1.0) -> None:
        self.shape: Shape = tensor.shape
        self.count = math.prod(self.shape)
        self._parts = [
            (piece.region, [(factor * sign, term) for sign, term in piece.terms()]) for piece in tensor.pieces
        ]

    @classmethod
    def of_sketch(cls, tensor: LogicalTensor, num_buckets: int, factor: float = 1.0) -> Values:
        """Take the numbers of a sketch for values: sums and differences of tensors are those of their sketches."""
        return cls.of_numbers(tensor.sketched(num_buckets), factor)

    @classmethod
    def of_numbers(cls, numbers: torch.Tensor, factor: float = 1.0) -> Values:
        """Take a few numbers that are in memory for values."""
        found = cls.__new__(cls)
        found.shape, found.count = tuple(numbers.shape), numbers.numel()
        found._parts = [(Region.whole(found.shape), [(factor, numbers)])]
        return found

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
        """Return the row-major indices of about so many evenly spread elements, or of all if there are not more."""
        # At an odd distance, which is no multiple of a power of two, as widths are.
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
                part = part.to(torch.float64, copy=len(terms) == 1)  # never the file's own memory
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
    """How many indices of a dim a block has."""
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
    return row, math.sqrt(rest / max(norm, 1e-300))


def sketch_rows(row: torch.Tensor, shape: Shape, num_buckets: int) -> torch.Tensor:
    """Sketch a tensor of this shape whose vectors along the last dim all are this row."""
    total = torch.zeros(num_buckets, dtype=torch.float64, device="cpu")
    for bounds in cut_chunks(shape, BLOCK):
        region = Region(shape, tuple((run,) for run in bounds))
        total += compute_sketch(row[slice(*bounds[-1])].expand(region.local_shape).contiguous(), region, num_buckets)
    return total


def count_directions(count: int) -> int:
    """How many directions the rows of a tensor of so many elements are projected on."""
    return _MANY_DIRECTIONS if count <= _FEW_ELEMENTS else _FEW_DIRECTIONS


def project(values: Values, dim: int, num_directions: int) -> torch.Tensor:
    """Project what each index of a dim holds on some directions: equal rows stay equal, and distances nearly so.

    The directions are products of one vector for each other dim. Few enough elements stay as they are.
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
    """Project the rows of g.T @ x, whose rows and columns are the last dims of both, without making it."""
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
    """The part of the last dim that a block has, and the vectors along it, which follow each other."""
    first = ravel_index([start for start, _ in bounds[:-1]], shape[:-1])
    num_vectors = math.prod(stop - start for start, stop in bounds[:-1])
    return slice(*bounds[-1]), slice(first, first + num_vectors)


@functools.lru_cache(maxsize=8)
def _draw_directions(seed: int, size: int, num_directions: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, num_directions, dtype=torch.float64, device="cpu", generator=generator)
