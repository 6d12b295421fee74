"""This module makes any region of a logical tensor from its name alone.

Every element is a function of (seed, name, its row-major index in the logical tensor), so a rank makes its own shard
with no communication and no full copy, and every sharding gives the same bits on every device. The function is
splitmix64 over a counter: a 64-bit hash, because with a 32-bit mix the streams of different names turned out to be
permutations of one another. Arithmetic is exact integer arithmetic up to one float32 multiply and one add.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ttrace.tensors import ranges as rg
from ttrace.tensors.ids import TensorId
from ttrace.tensors.region import Region
from ttrace.values.chunks import chunks

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LANE_MEAN = 2 * 65535
_LANE_STD = (4 * (65536**2 - 1) / 12) ** 0.5


class Distribution(Protocol):
    """What generated values look like; `draw` turns random 64-bit words into values."""

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, key: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Normal:
    """Nearly normal: the sum of four 16-bit lanes, within 3.5 standard deviations of the mean."""

    mean: float = 0.0
    std: float = 1.0

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, key: int) -> torch.Tensor:  # noqa: ARG002
        lanes = sum(((words >> shift) & 0xFFFF for shift in (16, 32, 48)), start=words & 0xFFFF)
        centred = (lanes - _LANE_MEAN).to(torch.float32)
        # Python floats are doubles: rounding the factor to float32 first keeps every device to the same product.
        factor = torch.tensor(self.std / _LANE_STD, dtype=torch.float32, device=words.device)
        return centred.mul_(factor).add_(torch.tensor(self.mean, dtype=torch.float32, device=words.device))


@dataclass(frozen=True)
class Signed:
    """Numbers of either sign whose size lies between half of `size` and one and a half: none is near zero."""

    size: float = 1.0

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, key: int) -> torch.Tensor:  # noqa: ARG002
        magnitude = (((words >> 16) & 0xFFFFFF) + (1 << 23)).to(torch.float32)
        sign = ((words >> 60) & 1) * 2 - 1
        return magnitude.mul_(sign).mul_(torch.tensor(self.size / (1 << 24), dtype=torch.float32, device=words.device))


@dataclass(frozen=True)
class Integers:
    """Integers in [low, high); a share `1 - keep` of them is `hole` instead, as ignored labels are."""

    low: int
    high: int
    keep: float = 1.0
    hole: int = -100

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, key: int) -> torch.Tensor:  # noqa: ARG002
        # Bits 16 to 47 choose the value, bits 0 to 15 and 48 to 63 (Mask) whether it stays.
        value = (((words >> 16) & 0xFFFFFFFF) * (self.high - self.low) >> 32) + self.low
        if self.keep < 1.0:
            value = torch.where(_kept(words, self.keep), value, self.hole)
        return value


@dataclass(frozen=True)
class Mask:
    """True with probability `keep`."""

    keep: float = 0.5

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, key: int) -> torch.Tensor:  # noqa: ARG002
        return _kept(words, self.keep)


@dataclass(frozen=True)
class Permutation:
    """A permutation of 0 .. numel - 1: a Feistel cipher over the index, walked until it falls inside."""

    def draw(self, words: torch.Tensor, index: torch.Tensor, numel: int, key: int) -> torch.Tensor:  # noqa: ARG002
        half = max((max(numel - 1, 1).bit_length() + 1) // 2, 1)
        value = _feistel(index, half, key)
        while bool((outside := value >= numel).any()):
            value = torch.where(outside, _feistel(value, half, key), value)
        return value


def values(
    name: str | TensorId,
    region: Region,
    *,
    dtype: torch.dtype,
    distribution: Distribution,
    seed: int = 0,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This region of the logical tensor called `name`: the same bits whatever the region is part of.

    `out`, contiguous, spares fresh memory: pages that are touched for the first time cost as much as their values.
    """
    if out is None:
        out = torch.empty(region.local_shape, dtype=dtype, device=device)
    flat = out.view(-1)
    key = stream_key(name, seed)
    numel = Region.whole(region.shape).numel
    at = 0
    for chunk in _chunks(region):
        rows, columns = (part.to(device) for part in chunk.linear())
        index = (rows[:, None] + columns).view(-1)
        drawn = distribution.draw(_words(index, key), index, numel, key)
        flat[at : at + index.numel()] = drawn.to(dtype)
        at += index.numel()
    return out


def stream_key(name: str | TensorId, seed: int) -> int:
    """The 64-bit key of a name's stream, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _chunks(region: Region) -> Iterator[Region]:
    """The region as small boxes, in the order in which the local tensor holds them.

    Even the indices of a whole shard would take more memory than the shard
    (tests/values/test_generate.py::test_making_a_shard_takes_hardly_more_memory_than_the_shard).
    """
    for box in region.boxes():
        for cut in chunks(box.shape):
            dims = tuple(rg.select(ranges, (run,)) for ranges, run in zip(box.dims, cut, strict=True))
            yield Region(region.shape, dims)


def _words(index: torch.Tensor, key: int) -> torch.Tensor:
    """One 64-bit word per index; int64 wraps around, and shifts are made logical by masking."""
    word = index * _signed(_GOLDEN) + key
    word = (word ^ _shift_right(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shift_right(word, 27)) * _signed(_MIX_2)
    return word ^ _shift_right(word, 31)


def _shift_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _kept(words: torch.Tensor, keep: float) -> torch.Tensor:
    chance = (words & 0xFFFF) << 16 | ((words >> 48) & 0xFFFF)
    return chance < round(keep * (1 << 32))


def _feistel(value: torch.Tensor, half: int, key: int) -> torch.Tensor:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(4):
        left, right = right, left ^ (_words(right, key + turn + 1) & mask)
    return left << half | right
