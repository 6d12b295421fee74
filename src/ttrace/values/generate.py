"""Generated values: any region of a logical tensor, from its name alone.

Every element is a function of (seed, name, its row-major index in the logical tensor), so a rank generates its own
shard without communication or a full copy, and every sharding has the same bits on every device. The arithmetic is on
integers and exact, except for a final float32 multiply and add. Kernels generate normal and signed values in C and in
Triton; torch generates all others. All of them produce the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.values.chunks import cut_region
from ttrace.values.kernels.choice import choose_device_kernels, choose_kernels
from ttrace.values.kernels.runs import FILL_DTYPES, NORMAL, SIGNED, Recipe, fill
from ttrace.values.words import WordStream

_EDGE_EVERY = 4
_LANE_MEAN = 2 * 65535
_LANE_STD = (4 * (65536**2 - 1) / 12) ** 0.5


class Distribution(Protocol):
    """A distribution of generated values; `draw` turns random 64-bit words into values."""

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor: ...


@dataclass(frozen=True)
class Normal:
    """Nearly normal numbers: the sum of four 16-bit lanes, within 3.5 standard deviations of the mean."""

    mean: float = 0.0
    std: float = 1.0

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor:  # noqa: ARG002
        lanes = sum(((words >> shift) & 0xFFFF for shift in (16, 32, 48)), start=words & 0xFFFF)
        centred = (lanes - _LANE_MEAN).to(torch.float32)
        return centred.mul_(_round(self.std / _LANE_STD)).add_(_round(self.mean))


@dataclass(frozen=True)
class Signed:
    """Positive and negative numbers with an absolute value between 0.5 and 1.5 times `size`, so none is near zero."""

    size: float = 1.0

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor:  # noqa: ARG002
        magnitude = (((words >> 16) & 0xFFFFFF) + (1 << 23)).to(torch.float32)
        sign = ((words >> 60) & 1) * 2 - 1
        return magnitude.mul_(sign).mul_(_round(self.size / (1 << 24)))


@dataclass(frozen=True)
class Integers:
    """Integers in [low, high); a fraction `1 - keep` of them is replaced by `hole`, as in ignored labels."""

    low: int
    high: int
    keep: float = 1.0
    hole: int = -100

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor:  # noqa: ARG002
        # Bits 16 to 47 determine the value; bits 0 to 15 and 48 to 63 determine whether it is kept (see Mask).
        value = (((words >> 16) & 0xFFFFFFFF) * (self.high - self.low) >> 32) + self.low
        if self.keep < 1.0:
            value = torch.where(_is_kept(words, self.keep), value, self.hole)
        return value


@dataclass(frozen=True)
class Rows:
    """Indices of rows in a table of `num_rows`, such as token ids; a fraction `1 - keep` is replaced by `hole`.

    Every fourth value is the first or last row of a shard, for a table cut over 1, 2, 4, 8 and 16 ranks. Lookups in
    sharded tables go wrong at these rows, and with a large vocabulary few random batches would contain them.
    """

    num_rows: int
    keep: float = 1.0
    hole: int = -100
    limit: int = 0
    """All indices are below this number, unless it is 0: the rows from there on are padding, which has no logits."""

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor:
        limit = self.limit or self.num_rows
        value = Integers(0, limit).draw(words, index, numel, stream)
        rows = [row for row in _list_edges(self.num_rows) if row < limit]
        edges = torch.tensor(list(dict.fromkeys([*rows, limit - 1])), dtype=torch.int64, device="cpu")
        edges = edges.to(words.device, non_blocking=True)
        turn = torch.div(index, _EDGE_EVERY, rounding_mode="floor") % len(edges)
        value = torch.where(index % _EDGE_EVERY == 0, edges[turn], value)
        return torch.where(_is_kept(words, self.keep), value, self.hole) if self.keep < 1.0 else value


@dataclass(frozen=True)
class Mask:
    """Booleans that are true with probability `keep`."""

    keep: float = 0.5

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor:  # noqa: ARG002
        return _is_kept(words, self.keep)


@dataclass(frozen=True)
class Permutation:
    """A permutation of 0 .. numel - 1: a Feistel cipher over the index, repeated until the result is below numel."""

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, stream: WordStream) -> torch.Tensor:  # noqa: ARG002
        half = max((max(numel - 1, 1).bit_length() + 1) // 2, 1)
        value = _encrypt(index, half, stream)
        while (outside := torch.nonzero(value >= numel).view(-1)).numel():
            value[outside] = _encrypt(value[outside], half, stream)
        return value


def generate_values(
    name: str | TensorId,
    region: Region,
    *,
    dtype: torch.dtype,
    distribution: Distribution,
    seed: int = 0,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Generate this region of the logical tensor called `name`: an element has the same bits in every region.

    Pass a contiguous `out` to reuse memory: touching a new page costs as much as generating its values.
    """
    if out is None:
        out = torch.empty(region.local_shape, dtype=dtype, device=device)
    stream = WordStream.of(name, seed)
    library = choose_kernels() if out.device.type == "cpu" else None
    recipe = _make_recipe(distribution)
    device_kernels = None if library is not None or recipe is None else choose_device_kernels(out)
    if device_kernels is not None and device_kernels.fill(out, region, stream, recipe):
        return out
    if library is None or recipe is None:
        _fill_with_torch(out, region, stream, distribution)
    elif dtype in FILL_DTYPES:
        fill(library, out, region, stream, recipe)
    else:
        for chunk, part in cut_region(region, out):
            part.copy_(
                fill(library, torch.empty(chunk.local_shape, dtype=torch.float32, device="cpu"), chunk, stream, recipe)
            )
    return out


def _make_recipe(distribution: Distribution) -> Recipe | None:
    """Describe these values for the kernels; None if kernels cannot generate them."""
    if isinstance(distribution, Normal):
        return Recipe(NORMAL, distribution.std / _LANE_STD, distribution.mean)
    return Recipe(SIGNED, distribution.size / (1 << 24)) if isinstance(distribution, Signed) else None


def _fill_with_torch(out: torch.Tensor, region: Region, stream: WordStream, distribution: Distribution) -> None:
    """Fill with torch, on any device."""
    numel = Region.whole(region.shape).numel
    for chunk, part in cut_region(region, out):
        rows, columns = chunk.linear(out.device)
        index = (rows[:, None] + columns).view(-1)
        drawn = distribution.draw(stream.words(index), index, numel, stream)
        part.copy_(drawn.view(part.shape))


def _round(number: float) -> torch.Tensor:
    """Round to float32 before multiplying: Python's floats are doubles, and devices would compute different products.

    torch passes a host tensor with one element to a device's kernel by value, so nothing is copied to the device.
    """
    return torch.tensor(number, dtype=torch.float32, device="cpu")


def _is_kept(words: torch.Tensor, keep: float) -> torch.Tensor:
    number = (words & 0xFFFF) << 16 | ((words >> 48) & 0xFFFF)
    return number < round(keep * (1 << 32))


def _list_edges(num_rows: int) -> list[int]:
    """List the first and last rows of the parts of a table that is cut into 1, 2, 4, 8 and 16 parts, in this order."""
    rows = []
    for num_parts in (1, 2, 4, 8, 16):
        size = -(-num_rows // num_parts)
        starts = range(0, num_rows, size)
        rows += [*starts, *(min(start + size, num_rows) - 1 for start in starts)]
    return list(dict.fromkeys(rows))


def _encrypt(value: torch.Tensor, half: int, stream: WordStream) -> torch.Tensor:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(4):
        left, right = right, left ^ (stream.shift(turn + 1).words(right) & mask)
    return left << half | right
