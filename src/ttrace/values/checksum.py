"""CRC-32C checksums of memory, by the C kernel or, bit by bit the same, by torch.

The instruction that processors have for it reads memory about as fast as memory is read at all.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ttrace.values.kernels.library import choose_kernels

_POLYNOMIAL = 0x82F63B78
_ALL = 0xFFFFFFFF
_LANE_BYTES, _MOST_LANES = 256, 4096
"""Of the pieces that torch reads side by side; what is left over is read byte by byte."""


def compute_checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """The checksum of a contiguous tensor's bytes, which follow others whose checksum is `before`."""
    assert tensor.is_cpu, "kernels read the memory of the host"
    assert tensor.is_contiguous(), "the bytes of a tensor with gaps have no order"
    return compute_checksum_at(tensor.data_ptr(), tensor.nbytes, before)


def compute_checksum_at(address: int, num_bytes: int, before: int = 0) -> int:
    """The same of memory by its address."""
    if num_bytes == 0:
        return before
    found = choose_kernels()
    if found is None:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        return _computed(torch.frombuffer(memory, dtype=torch.uint8), before)
    return found.crc(address, num_bytes, before)


def _computed(data: torch.Tensor, before: int) -> int:
    crc = before ^ _ALL
    while num_lanes := min(len(data) // _LANE_BYTES, _MOST_LANES):
        taken = (1 << num_lanes.bit_length() - 1) * _LANE_BYTES  # a power of two: lanes are put together two by two
        crc = _of_lanes(data[:taken].view(-1, _LANE_BYTES), crc)
        data = data[taken:]
    for byte in data.tolist():
        crc = _bytes_table()[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _ALL


def _of_lanes(lanes: torch.Tensor, before: int) -> int:
    """The checksum of all lanes end to end: each is read by itself, then neighbours are put together."""
    table = torch.tensor(_bytes_table())
    found = torch.zeros(len(lanes), dtype=torch.int64)
    found[0] = before
    for column in lanes.t().contiguous():
        found = table.index_select(0, (found ^ column) & 0xFF) ^ (found >> 8)
    num_bytes = _LANE_BYTES
    while len(found) > 1:
        first, second = found[0::2], found[1::2]
        shifted = torch.zeros_like(first)
        for bit, moved in enumerate(_shift(num_bytes)):
            shifted ^= (first >> bit & 1) * moved
        found = shifted ^ second
        num_bytes *= 2
    return int(found)


@cache
def _bytes_table() -> list[int]:
    """What becomes of a checksum's last byte, by its value."""
    table = list(range(256))
    for _ in range(8):
        table = [_POLYNOMIAL ^ crc >> 1 if crc & 1 else crc >> 1 for crc in table]
    return table


@cache
def _shift(num_bytes: int) -> tuple[int, ...]:
    """What becomes of each bit of a checksum that so many zero bytes follow; a power of two of them."""
    if num_bytes == 1:
        table = _bytes_table()
        return tuple(table[1 << bit & 0xFF] ^ (1 << bit) >> 8 for bit in range(32))
    half = _shift(num_bytes // 2)
    return tuple(_moved(half, crc) for crc in half)


def _moved(shift: tuple[int, ...], crc: int) -> int:
    found = 0
    for bit, moved in enumerate(shift):
        if crc >> bit & 1:
            found ^= moved
    return found
