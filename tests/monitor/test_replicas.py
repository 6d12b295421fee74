"""Fingerprints change with every bit, and do not depend on how a tensor lies in memory."""

from __future__ import annotations

import pytest
import torch

from ttrace.monitor.replicas import combine, make_fingerprint, read_fingerprints

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (300_001,)])
def test_every_flipped_bit_shows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    drawn = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, shape, generator=drawn, dtype=torch.int64).to(dtype)
    [right] = read_fingerprints([make_fingerprint(tensor)])
    data = tensor.reshape(-1).view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    for place in {0, len(data) // 2, len(data) - 1}:
        for bit in (0, 7):
            data[place] ^= 1 << bit
            assert read_fingerprints([make_fingerprint(tensor)]) != [right]
            data[place] ^= 1 << bit
    assert read_fingerprints([make_fingerprint(tensor)]) == [right]


def test_two_elements_that_are_swapped_show() -> None:
    tensor = torch.arange(1000.0)
    other = tensor.clone()
    other[[3, 997]] = other[[997, 3]]
    ours, theirs = read_fingerprints([make_fingerprint(tensor), make_fingerprint(other)])
    assert ours != theirs


def test_a_view_has_the_fingerprint_of_its_copy() -> None:
    tensor = torch.randn(6, 10)
    views = (tensor.t(), tensor[1:, 3:], tensor.flatten()[1:])
    for view in views:
        ours, theirs = read_fingerprints([make_fingerprint(view), make_fingerprint(view.clone())])
        assert ours == theirs


def test_a_combination_does_not_depend_on_the_order() -> None:
    named = [("a", 3), ("b", -(1 << 62)), ("c", 1 << 62)]
    assert combine(named) == combine(reversed(named))
    assert combine(named) != combine([("b", 3), ("a", -(1 << 62)), ("c", 1 << 62)])
