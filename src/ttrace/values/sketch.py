"""Sketches: k sums of a tensor's elements, from which norms and differences are estimated to 1 / sqrt(2 k).

Element i of the logical tensor is added, with a random sign, to bucket (i + turn) mod k, where each block of k elements
has a random turn. Signs and turns depend on i alone, so the sketches of shards, and of summands, add up to the sketch
of the whole, and the sketches of two runs, or of two tensors of one shape, can be subtracted. Without the turns, an
error in one column of a matrix would be in one bucket only, and its estimate would be wrong by half.

Sums are float64: the rounding of float32 sums would be larger than the difference of two float32 tensors. Sums of
16-bit and 8-bit numbers are exact unless their magnitudes are very far apart, so equal tensors have equal sketches for
every sharding. Sums of float32 numbers agree to about 1e-15 of the tensor's norm.
"""

from __future__ import annotations

import math

import torch

from ttrace.layouts.region import Region
from ttrace.values.chunks import cut_region
from ttrace.values.kernels.choice import choose_device_kernels, choose_kernels
from ttrace.values.kernels.library import is_readable
from ttrace.values.kernels.runs import compute_sums
from ttrace.values.words import WordStream

NUM_BUCKETS = 1024
"""The default k, which estimates differences to 2.2%."""
_NAME = "sketch"
"""The name of the stream of random signs and turns."""
_WORD_BITS = 6
WORD_BUCKETS = 1 << _WORD_BITS
"""The number of signs in one random word; the number of buckets is a multiple of it."""
_TURNS = 1 << 62
"""The index of the first word that is a turn; the words before it are signs."""


def compute_sketch(local: torch.Tensor, region: Region, k: int = NUM_BUCKETS, *, seed: int = 0) -> torch.Tensor:
    """Compute the k sums of a region of a logical tensor, in float64 and on the tensor's device.

    An element that is not finite makes its bucket not finite. The seed determines signs and turns; sketches in traces
    have seed 0.
    """
    if k < 1 or k % WORD_BUCKETS:
        raise ValueError(f"a sketch has a multiple of {WORD_BUCKETS} buckets, not {k}")
    if tuple(local.shape) != region.local_shape:
        raise ValueError(f"a tensor of shape {tuple(local.shape)} does not hold a region of {region.local_shape}")
    stream = WordStream.of(_NAME, seed)
    library = choose_kernels() if is_readable(local) else None
    if library is not None:
        return compute_sums(library, _close_gaps(local, region), region, stream, k)
    device_kernels = choose_device_kernels(local)
    sums = None
    if device_kernels is not None:
        sums = device_kernels.compute_sums(_close_gaps(local, region), region, stream, k)
    return _compute_with_torch(local, region, stream, k) if sums is None else sums


def _close_gaps(local: torch.Tensor, region: Region) -> torch.Tensor:
    """Make the last dim contiguous, as kernels need it."""
    has_gaps = region.flat is not None or (local.dim() and local.stride(-1) != 1)
    return local.contiguous() if has_gaps else local


def estimate_uncertainty(k: int) -> float:
    """Return the standard deviation of a norm that a sketch estimates, relative to the norm."""
    return 1 / math.sqrt(2 * k)


def _compute_with_torch(local: torch.Tensor, region: Region, stream: WordStream, k: int) -> torch.Tensor:
    total = torch.zeros(k, dtype=torch.float64, device=local.device)
    for chunk, part in cut_region(region, local):
        rows, columns = chunk.linear(local.device)
        index = (rows[:, None] + columns).view(-1)
        minus = (stream.words(index >> _WORD_BITS) >> (index & (WORD_BUCKETS - 1))) & 1
        block = torch.div(index, k, rounding_mode="floor")
        turn = ((stream.words(block + _TURNS) >> 32) & 0xFFFFFFFF) * k >> 32
        numbers = part.to(torch.float64).reshape(-1)
        # Not index_add_, which on CUDA adds in an order that varies; index_put_ sorts first.
        total.index_put_(((index + turn) % k,), torch.where(minus.bool(), -numbers, numbers), accumulate=True)
    return total
