"""Random 64-bit words for values and sketches, as a function of a name and an index.

The function is splitmix64: a counter, stepped by an odd number, goes through a 64-bit mix. Start and step both depend
on the name. If all names had one step, all streams would be the same sequence with different starts, and two of a
million long streams would overlap. With a 32-bit mix, streams of different names would even be permutations of each
other. All arithmetic is on integers, so torch on any device, the kernels and Python compute the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch

from ttrace.layouts.ids import TensorId

_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ALTERNATING = 0xAAAAAAAAAAAAAAAA
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class WordStream:
    """The random words of a name: word i is `mix(key + i * step)`. Both are signed, as int64 tensors need them."""

    key: int
    step: int

    @classmethod
    def of(cls, name: str | TensorId, seed: int = 0) -> WordStream:
        key = make_key(name, seed)
        return cls(key, _make_step(key))

    def words(self, index: torch.Tensor) -> torch.Tensor:
        """Return one word per index; int64 wraps around, and masks make the shifts logical."""
        word = index * self.step + self.key
        word = (word ^ shift_right(word, 30)) * _to_signed(_MIX_1)
        word = (word ^ shift_right(word, 27)) * _to_signed(_MIX_2)
        return word ^ shift_right(word, 31)

    def shift(self, by: int) -> WordStream:
        """Return another stream of the same name, to use beside this one."""
        return WordStream(_to_signed((self.key + by) & _MASK), self.step)


def make_key(name: str | TensorId, seed: int) -> int:
    """Make the 64-bit key of a name's stream, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def shift_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=4096)
def _make_step(key: int) -> int:
    """Make an odd step with at least 24 changes between adjacent bits, as SplittableRandom does for each generator."""
    step = _mix((key + _STEP) & _MASK) | 1
    if (step ^ step >> 1).bit_count() < 24:
        step ^= _ALTERNATING
    return _to_signed(step)


def _mix(word: int) -> int:
    word = ((word ^ word >> 30) * _MIX_1) & _MASK
    word = ((word ^ word >> 27) * _MIX_2) & _MASK
    return word ^ word >> 31


def _to_signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
