"""This module sums a tensor up in k numbers from which norms and differences can be told, to 1 / sqrt(2 k).

Element i of the logical tensor is added, with a random sign, to bucket (i + turn) mod k, where each block of k elements
has a random turn. Signs and turns depend on the tensor's name and on i alone, so the sketches of shards, and of
summands, add up to the sketch of the whole, and sketches of two runs can be subtracted. Without the turns an error in
one column of a matrix would fall into one bucket and be told wrong by half.

Sums are float64: those of float32 would drown the difference of two float32 tensors in rounding of their own. Sums of
16-bit and 8-bit numbers come out exact, unless their sizes are very far apart, so equal tensors have equal sketches
however they are cut; those of float32 numbers agree to about 1e-15 of the tensor's norm.
"""

from __future__ import annotations

import math

import torch

from ttrace.tensors.ids import TensorId
from ttrace.tensors.region import Region
from ttrace.values.chunks import cut_region
from ttrace.values.kernels.library import choose_kernels, is_readable
from ttrace.values.kernels.runs import compute_sums
from ttrace.values.words import WordStream

NUM_BUCKETS = 1024
"""The usual k: differences are told to 2.2%."""
_WORD = 64
"""Signs that come from one random word."""
_TURNS = 1 << 62
"""Words from here on are turns, those before it signs."""


def compute_sketch(name: str | TensorId, local: torch.Tensor, region: Region, k: int = NUM_BUCKETS) -> torch.Tensor:
    """The k sums, in float64 and on the tensor's device, of a region of the logical tensor called `name`.

    A number that is not finite makes its bucket so.
    """
    if k < 1 or k % _WORD:
        raise ValueError(f"a sketch has a multiple of {_WORD} buckets, not {k}")
    if tuple(local.shape) != region.local_shape:
        raise ValueError(f"a tensor of shape {tuple(local.shape)} does not hold a region of {region.local_shape}")
    stream = WordStream.of(name)
    found = choose_kernels() if is_readable(local) else None
    if found is None:
        return _torch_sums(local, region, stream, k)
    has_gaps = region.flat is not None or (local.dim() and local.stride(-1) != 1)
    return compute_sums(found, local.contiguous() if has_gaps else local, region, stream, k)


def estimate_uncertainty(k: int) -> float:
    """The standard deviation of a norm told by a sketch, relative to the norm."""
    return 1 / math.sqrt(2 * k)


def _torch_sums(local: torch.Tensor, region: Region, stream: WordStream, k: int) -> torch.Tensor:
    total = torch.zeros(k, dtype=torch.float64, device=local.device)
    for chunk, part in cut_region(region, local):
        rows, columns = (index.to(local.device) for index in chunk.linear())
        index = (rows[:, None] + columns).view(-1)
        minus = (stream.words(index // _WORD) >> (index % _WORD)) & 1
        turn = ((stream.words(index // k + _TURNS) >> 32) & 0xFFFFFFFF) * k >> 32
        numbers = part.to(torch.float64).reshape(-1)
        total.index_add_(0, (index + turn) % k, torch.where(minus.bool(), -numbers, numbers))
    return total
