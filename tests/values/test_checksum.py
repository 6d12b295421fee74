"""Checksums: CRC-32C as others compute it, the same bits whatever computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernel_variants import EACH_VARIANT, EVERY
from ttrace.values.checksum import compute_checksum, copy_with_checksum
from ttrace.values.kernels.choice import use_kernels

KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}
"""Of RFC 3720, appendix B.4, and of the catalogue of CRCs."""


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)


def bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = 0x82F63B78 ^ crc >> 1 if crc & 1 else crc >> 1
    return crc ^ 0xFFFFFFFF


@EACH_VARIANT
@pytest.mark.parametrize("data", KNOWN, ids=lambda data: repr(data[:9]))
def test_known_checksums(variant: str, data: bytes) -> None:
    with use_kernels(variant):
        assert compute_checksum(as_tensor(data)) == KNOWN[data]


# Around the sizes at which the kernel and torch go from bytes to words, lanes and blocks.
@EACH_VARIANT
@pytest.mark.parametrize("size", [1, 7, 8, 9, 255, 256, 257, 511, 1024, 12_287, 12_288, 12_289, 24_577, 40_000])
def test_all_sizes_at_all_addresses(variant: str, size: int) -> None:
    data = torch.randint(256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    with use_kernels(variant):
        for start in (0, 3):
            part = data[start : start + size]
            assert compute_checksum(part) == bit_by_bit(bytes(part.tolist()))


@given(data=st.binary(max_size=3000), cut=st.integers(0, 3000))
@settings(max_examples=50, deadline=None)
def test_a_checksum_goes_on_where_another_ended(data: bytes, cut: int) -> None:
    for variant in EVERY:
        with use_kernels(variant):
            first = compute_checksum(as_tensor(data[:cut]))
            assert compute_checksum(as_tensor(data[cut:]), first) == bit_by_bit(data)


@EACH_VARIANT
def test_large_memory_has_the_same_checksum(variant: str) -> None:
    data = torch.arange(700_001, dtype=torch.float32)
    with use_kernels(variant):
        assert (
            compute_checksum(data) == compute_checksum(data[350_000:], compute_checksum(data[:350_000])) == 0x083B7CC9
        )


@EACH_VARIANT
@pytest.mark.parametrize("size", [0, 1, 7, 64, 12_287, 12_288, 12_289, 40_000])
def test_a_copy_has_the_bytes_and_their_checksum(variant: str, size: int) -> None:
    source = torch.randint(256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))[3:]
    with use_kernels(variant):
        for start in (0, 5):  # in order, and not
            room = torch.zeros(size + 16, dtype=torch.uint8)
            crc = copy_with_checksum(source.data_ptr(), size, room[start:].data_ptr(), 7)
            assert torch.equal(room[start : start + size], source)
            assert not room[:start].any()
            assert not room[start + size :].any()
            assert crc == compute_checksum(source, 7)
