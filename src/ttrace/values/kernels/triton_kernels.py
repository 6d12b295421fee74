"""Kernels in Triton: generated values and sketches on an accelerator, in a few launches per tensor.

Their results are those of the C kernels: the same bits of generated values, and sums of sketches that differ in their
last bits at most. Nothing is added atomically, so every run gives the same sums. torch computes what they cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl

from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region
from ttrace.values.kernels.runs import NORMAL, Dim, Recipe, plan_dims
from ttrace.values.words import WordStream

_NUM_DIMS, _MOST_BOXES = 3, 16
"""A region with more boxes, or with boxes of more dims, is left to torch."""
_BLOCK = 1024
"""The number of elements that one program generates."""
_MOST_PROGRAMS = 512
"""The most programs for one sketch, each with its own sums. A large GPU runs about this many at once."""
_LEAST_RUN = 4
"""A sketch is left to torch if its rows are shorter than a block divided by this: most lanes would be idle."""
KNOWN_SUM, KNOWN_SQUARES = -1057.49609375, 1337312.1622753143
"""The sum of the values that `works_on` generates, and the sum of squares of their sketch."""


@dataclass(frozen=True)
class _Box:
    """Contiguous rows: the offsets of the first element, the sizes of the dims, and their strides."""

    logical: int
    local: int
    sizes: tuple[int, ...]
    logical_steps: tuple[int, ...]
    local_steps: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return self.sizes[0] * self.sizes[1] * self.sizes[2]


def works_on(device: torch.device) -> bool:
    """Compute a small case, and compare it with known results: a compiler may be missing, or may round differently."""
    region, stream = Region.whole((_BLOCK + 1,)), WordStream.of("known")
    numbers = torch.empty(region.local_shape, dtype=torch.float32, device=device)
    if not fill(numbers, region, stream, Recipe(NORMAL, 2.0**-10)):
        return False
    sums = compute_sums(numbers, region, stream, _BLOCK)
    return (
        sums is not None
        and float(numbers.sum(dtype=torch.float64)) == KNOWN_SUM
        and float(sums.square().sum()) == KNOWN_SQUARES
    )


def fill(out: torch.Tensor, region: Region, stream: WordStream, recipe: Recipe) -> bool:
    """Fill a contiguous tensor with the generated values of this region; return whether that was possible."""
    boxes = _plan(region, out.stride())
    if boxes is None:
        return False
    with _on(out):
        for box in boxes:
            _generate[(triton.cdiv(box.num_elements, _BLOCK),)](
                *(out, box.num_elements, *_describe(box), stream.key, stream.step, recipe.factor, recipe.mean),
                is_normal=recipe.kind == NORMAL,
                block_size=_BLOCK,
                enable_fp_fusion=False,  # a fused multiply-add rounds once, but torch rounds twice
            )
    return True


def compute_sums(local: torch.Tensor, region: Region, stream: WordStream, k: int) -> torch.Tensor | None:
    """Compute the sketch of a tensor whose last dim is contiguous; None if that is left to torch."""
    boxes = _plan(region, local.stride())
    if boxes is None or k & (k - 1) or any(map(partial(_has_short_rows, k=k), boxes)):
        return None
    counts = [box.sizes[0] * box.sizes[1] * _count_blocks(box, k) for box in boxes]
    programs = [min(count, _MOST_PROGRAMS) for count in counts]
    sums = torch.zeros((sum(programs), k), dtype=torch.float64, device=local.device)
    with _on(local):
        for box, count, num, rows in zip(boxes, counts, programs, sums.split(programs), strict=True):
            _sketch[(num,)](
                *(local, rows, count, _count_blocks(box, k), *_describe(box), stream.key, stream.step),
                k=k,
                num_programs=num,
                enable_fp_fusion=False,
            )
    return sums.sum(0)


def _has_short_rows(box: _Box, k: int) -> bool:
    return box.sizes[0] * box.sizes[1] > 1 and _LEAST_RUN * box.sizes[2] < k


def _count_blocks(box: _Box, k: int) -> int:
    """Count the blocks of k that a row may touch."""
    return (box.sizes[2] - 1) // k + 2


def _describe(box: _Box) -> tuple[int, ...]:
    return box.logical, box.local, *box.sizes[1:], *box.logical_steps[:2], *box.local_steps[:2]


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device instead of the current one. On the host, Triton's interpreter runs."""
    if tensor.is_cpu:
        return nullcontext()
    context: AbstractContextManager[object] = torch.get_device_module(tensor.device).device(tensor.device)
    return context


@lru_cache(maxsize=256)
def _plan(region: Region, strides: tuple[int, ...]) -> list[_Box] | None:
    """List the boxes of a region in which each dim has one range; None if they are too many."""
    boxes: list[_Box] = []
    for offset, dims in plan_dims(region, strides):
        if len(dims) > _NUM_DIMS:
            return None
        boxes += _cut(offset, dims)
        if len(boxes) > _MOST_BOXES:
            return None
    return boxes


def _cut(offset: int, dims: list[Dim]) -> Iterator[_Box]:
    """Yield a box for every combination of ranges."""
    dims = [(((0, 1),), 0, 0)] * (_NUM_DIMS - len(dims)) + dims
    places = [list(_place(ranges)) for ranges, _, _ in dims]
    logical_steps, local_steps = tuple(step for _, step, _ in dims), tuple(step for _, _, step in dims)
    for chosen in itertools.product(*places):
        yield _Box(
            sum(start * step for (start, _, _), step in zip(chosen, logical_steps, strict=True)),
            offset + sum(before * step for (_, before, _), step in zip(chosen, local_steps, strict=True)),
            tuple(size for _, _, size in chosen),
            logical_steps,
            local_steps,
        )


def _place(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield the start of each range, the number of elements in the ranges before it, and its own length."""
    before = 0
    for start, stop in ranges:
        yield start, before, stop - start
        before += stop - start


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]  # Triton compiles the source
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit(do_not_specialize=["key", "step"])
def _generate(  # type: ignore[no-untyped-def]
    out, count, logical, local, size1, size2, logical0, logical1, local0, local1, key, step, factor, mean,
    is_normal: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block_size + tl.arange(0, block_size)
    column, row = at % size2, at // size2
    index = logical + row // size1 * logical0 + row % size1 * logical1 + column
    word = _mix(index.to(tl.uint64) * step.to(tl.uint64) + key.to(tl.uint64))
    if is_normal:
        lanes = (word & 0xFFFF) + (word >> 16 & 0xFFFF) + (word >> 32 & 0xFFFF) + (word >> 48)
        number = (lanes.to(tl.int32) - 131070).to(tl.float32) * factor + mean
    else:
        size = ((word >> 16 & 0xFFFFFF) + 8388608).to(tl.int32)
        number = tl.where((word >> 60 & 1) == 1, size, -size).to(tl.float32) * factor
    to = local + row // size1 * local0 + row % size1 * local1 + column
    if out.dtype.element_ty == tl.bfloat16:  # rounds to nearest even explicitly, since not every backend of Triton does
        bits = number.to(tl.uint32, bitcast=True)
        number = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(out + to, number.to(out.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["key", "step"])
def _sketch(  # type: ignore[no-untyped-def]
    data, sums, count, num_blocks, logical, local, size1, size2, logical0, logical1, local0, local1, key, step,
    k: tl.constexpr, num_programs: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    bucket = tl.arange(0, k).to(tl.int64)
    total = tl.zeros((k,), tl.float64)
    first, stride = key.to(tl.uint64), step.to(tl.uint64)
    for item in range(program, count, num_programs):
        row = (item // num_blocks).to(tl.int64)
        begin = logical + row // size1 * logical0 + row % size1 * logical1
        block = begin // k + item % num_blocks
        turn = (_mix(first + (block.to(tl.uint64) + 4611686018427387904) * stride) >> 32) * k >> 32
        index = block * k + (bucket - turn.to(tl.int64) + k) % k
        at = local + row // size1 * local0 + row % size1 * local1 + index - begin
        number = tl.load(data + at, mask=(index >= begin) & (index < begin + size2), other=0.0).to(tl.float64)
        signs = _mix(first + (index >> 6).to(tl.uint64) * stride) >> (index & 63).to(tl.uint64)
        total += tl.where((signs & 1) == 1, -number, number)
    tl.store(sums + program.to(tl.int64) * k + bucket, total)
