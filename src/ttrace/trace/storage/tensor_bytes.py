"""Bytes of a tensor as a trace holds them, without large copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch

BytesSample = tuple[int, bytes, bytes]


class TensorBytes:
    """A tensor to write. If it is not contiguous in the host's memory it is copied, `max_bytes` at a time."""

    is_read_once = False

    def __init__(self, tensor: torch.Tensor, max_bytes: int) -> None:
        self.shape, self.dtype, self.num_bytes = tuple(tensor.shape), tensor.dtype, tensor.nbytes
        self._max_bytes = max_bytes
        # Most tensors come in one part, and are looked at up to three times.
        is_whole = self.num_bytes <= max_bytes or _is_in_order(tensor)
        self._tensor = _put_in_order(tensor) if is_whole else tensor
        self._whole = view_memory(self._tensor) if is_whole else None

    def parts(self) -> Iterable[memoryview]:
        """Return all bytes, row major. Each part is valid until the next one is requested."""
        return (self._whole,) if self._whole is not None else self._copied_parts()

    @cached_property
    def sample(self) -> BytesSample:
        """A few of its bytes, which tensors with other bytes rarely share."""
        for first in self.parts():
            return take_sample(self.num_bytes, first)
        raise AssertionError("every tensor has a part")

    def _copied_parts(self) -> Iterator[memoryview]:
        for part in _split(self._tensor, self._max_bytes):
            yield view_memory(part)
            del part  # before the next one is made


def take_sample(num_bytes: int, first: memoryview) -> BytesSample:
    """Take a few bytes of a tensor's first part."""
    return num_bytes, bytes(first[:64]), bytes(first[-64:])


def _split(tensor: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    if tensor.nbytes <= max_bytes or tensor.numel() == 1:
        yield _put_in_order(tensor)
        return
    # Dims in front of the first that can be halved have size 1, so that halves are in order.
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    for half in tensor.split(-(-tensor.shape[dim] // 2), dim):
        yield from _split(half, max_bytes)


def _put_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is contiguous in the host's memory, else a copy that is."""
    return (
        tensor
        if _is_in_order(tensor)
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    )


def _is_in_order(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def view_memory(tensor: torch.Tensor) -> memoryview:
    """View the tensor's memory while it lives: without a copy, and without numpy, which has no bfloat16 and float8."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
