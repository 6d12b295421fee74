"""Fingerprints of tensors: 64 bits that change if any bit of the tensor does."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch
import torch.nn.functional as F

_WORD = 8
"""Bytes that are read as one number."""
_ON_HOST, _ON_DEVICE = 1 << 18, 1 << 24
"""Numbers that are multiplied at once: what fits a core's cache, and what keeps a device busy."""
_MASK = (1 << 64) - 1


def make_fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Make the fingerprint of a tensor's bytes, as a number on its device: nothing waits for it.

    It is the sum of all 64-bit words, each times an odd number that belongs to its place. An odd number has an inverse,
    so that a change of a single word always shows; of several, but for one case in 2**64.
    """
    words = _read_words(tensor)
    size = _ON_HOST if words.is_cpu else _ON_DEVICE
    factors = _make_factors(size, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(size):
        own = factors[: len(part)]
        # Devices have no product of vectors of integers.
        total = total * 3 + (torch.dot(part, own) if words.is_cpu else (part * own).sum())
    return total


def read_fingerprints(fingerprints: Iterable[torch.Tensor]) -> list[int]:
    """Read fingerprints as numbers; the training thread waits once for each device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, each in enumerate(fingerprints):
        by_device.setdefault(each.device, []).append((number, each))
    found: dict[int, int] = {}
    for numbered in by_device.values():
        values = torch.stack([each for _, each in numbered]).tolist()
        found |= dict(zip((number for number, _ in numbered), values, strict=True))
    return [found[number] for number in range(len(found))]


def combine(named: Iterable[tuple[str, int]]) -> int:
    """Combine the fingerprints of several things into one; it does not depend on their order."""
    total = sum(value * _make_factor(name) for name, value in named) & _MASK
    return total - (1 << 64) if total >> 63 else total


def make_text_fingerprint(text: str) -> int:
    """Make the fingerprint of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_WORD).digest(), "little", signed=True)


@functools.cache
def _make_factor(name: str) -> int:
    return make_text_fingerprint(name) | 1


def _read_words(tensor: torch.Tensor) -> torch.Tensor:
    """Read the bytes of a tensor as 64-bit numbers, with zeros at the end if they are not a multiple."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.nbytes % _WORD or flat.storage_offset() * flat.element_size() % _WORD:
        flat = F.pad(flat.view(torch.uint8), (0, -flat.nbytes % _WORD))
    return flat.view(torch.int64)


@functools.cache
def _make_factors(size: int, device: torch.device) -> torch.Tensor:
    """Make the odd numbers of all places, the same on every rank, without touching the script's random state."""
    generator = torch.Generator("cpu").manual_seed(size)
    numbers = torch.randint(-(1 << 62), 1 << 62, (size,), generator=generator, dtype=torch.int64, device="cpu")
    return (numbers * 2 + 1).to(device)
