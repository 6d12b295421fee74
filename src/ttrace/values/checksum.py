"""CRC-32C checksums of memory and of copies, from the C kernel or, with the same result, from torch.

CRC-32C, because processors have an instruction for it that is about as fast as reading memory.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ttrace.values.kernels.choice import choose_kernels

_POLYNOMIAL = 0x82F63B78
_ALL = 0xFFFFFFFF
_LANE_BYTES, _MOST_LANES = 256, 4096
"""torch computes up to this many lanes of this many bytes at once. The remaining bytes are computed one by one."""


def compute_checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """Compute the checksum of a contiguous tensor's bytes; `before` is the checksum of all bytes before them."""
    assert tensor.is_cpu, "kernels read host memory"
    assert tensor.is_contiguous(), "the bytes of a tensor with gaps have no order"
    return compute_checksum_at(tensor.data_ptr(), tensor.nbytes, before)


def compute_checksum_at(address: int, num_bytes: int, before: int = 0) -> int:
    """Compute the checksum of memory at an address, as `compute_checksum` does."""
    if num_bytes == 0:
        return before
    library = choose_kernels()
    if library is None:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        return _compute_with_torch(torch.frombuffer(memory, dtype=torch.uint8), before)
    return library.crc(address, num_bytes, before)


def copy_with_checksum(source: int, num_bytes: int, to: int, before: int = 0) -> int:
    """Copy memory from one address to another, preferably a multiple of 8, and compute the checksum of the copy.

    The memory is read once, so the checksum is that of the copy even if a collective is still writing to the source.
    """
    library = choose_kernels()
    if library is not None:
        return library.copy(source, num_bytes, before, to)
    ctypes.memmove(to, source, num_bytes)
    return compute_checksum_at(to, num_bytes, before)


def _compute_with_torch(data: torch.Tensor, before: int) -> int:
    crc = before ^ _ALL
    while num_lanes := min(len(data) // _LANE_BYTES, _MOST_LANES):
        taken = (1 << num_lanes.bit_length() - 1) * _LANE_BYTES  # a power of two, since lanes are combined in pairs
        crc = _combine_lanes(data[:taken].view(-1, _LANE_BYTES), crc)
        data = data[taken:]
    for byte in data.tolist():
        crc = _make_table()[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _ALL


def _combine_lanes(lanes: torch.Tensor, before: int) -> int:
    """Compute the checksum of consecutive lanes: first of each lane alone, then of neighbours combined in pairs."""
    table = torch.tensor(_make_table(), dtype=torch.int64, device="cpu")
    sums = torch.zeros(len(lanes), dtype=torch.int64, device="cpu")
    sums[0] = before
    for column in lanes.t().contiguous():
        sums = table.index_select(0, (sums ^ column) & 0xFF) ^ (sums >> 8)
    num_bytes = _LANE_BYTES
    while len(sums) > 1:
        first, second = sums[0::2], sums[1::2]
        shifted = torch.zeros_like(first)
        for bit, moved in enumerate(_shift_bits(num_bytes)):
            shifted ^= (first >> bit & 1) * moved
        sums = shifted ^ second
        num_bytes *= 2
    return int(sums)


@cache
def _make_table() -> list[int]:
    """Make the table that maps a checksum's last byte to the change that it causes."""
    table = list(range(256))
    for _ in range(8):
        table = [_POLYNOMIAL ^ crc >> 1 if crc & 1 else crc >> 1 for crc in table]
    return table


@cache
def _shift_bits(num_bytes: int) -> tuple[int, ...]:
    """Compute what each bit of a checksum becomes after `num_bytes` zero bytes, a power of two."""
    if num_bytes == 1:
        table = _make_table()
        return tuple(table[1 << bit & 0xFF] ^ (1 << bit) >> 8 for bit in range(32))
    half = _shift_bits(num_bytes // 2)
    return tuple(_apply_shift(half, crc) for crc in half)


def _apply_shift(shift: tuple[int, ...], crc: int) -> int:
    shifted = 0
    for bit, moved in enumerate(shift):
        if crc >> bit & 1:
            shifted ^= moved
    return shifted
