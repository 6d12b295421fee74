"""Bytes of tensors: on the host without large copies, and on accelerators through pinned memory.

A tensor on an accelerator is copied on a separate stream of its device, which waits for the stream that produced the
tensor. Several tensors share a chunk, and one event shows that all of them have arrived, so the thread that writes them
waits once per chunk. The training thread never waits for the device. It waits only for a free chunk, if tensors are
recorded faster than they are written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property

import torch

DEVICE_ERRORS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""Errors of a device, which are the training script's own: torch reports them at some later call. Since torch 2.8."""
_ALIGNED = 16
_WITHOUT_STREAMS = ("cpu", "mps")
"""Devices whose tensors are read immediately: the host, and devices without streams and pinned memory."""


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a device that computes asynchronously."""
    return tensor.device.type not in _WITHOUT_STREAMS


class Change(Enum):
    """When a tensor may be changed in place after its copy was requested."""

    SOON = "soon"
    """Immediately: it is copied on the device first."""
    LATER = "later"
    """Between steps, as parameters are: its stream waits for the copy."""
    NEVER = "never"


class CopyStreams:
    """One stream per device on which tensors are copied to the host."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._used: set[torch.Stream] = set()
        """The streams that have copied something since the last event."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, change: Change) -> None:
        """Copy into pinned memory, some time after the source's own stream has produced it."""
        device = source.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        current = torch.accelerator.current_stream(device)
        if change is Change.SOON:
            source = source.clone()
        stream.wait_stream(current)
        with stream:
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not reused before the copy has ended
        if change is Change.LATER:
            current.wait_stream(stream)
        self._used.add(stream)

    def record_events(self) -> list[torch.Event]:
        """Return events that happen when all copies since the last call have ended."""
        events = [stream.record_event() for stream in self._used]
        self._used.clear()
        return events


class PinnedChunk:
    """A piece of pinned memory that is filled with tensors, and read once all of them have arrived."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.num_bytes = num_bytes
        self._used = 0
        self._arrivals: list[torch.Event] = []

    def take(self, num_bytes: int) -> int | None:
        """Reserve some bytes and return where they begin; None if they do not fit any more."""
        begin = -(-self._used // _ALIGNED) * _ALIGNED
        if begin + num_bytes > self.num_bytes:
            return None
        self._used = begin + num_bytes
        return begin

    def seal(self, arrivals: list[torch.Event]) -> None:
        """Remember what to wait for before this chunk is read."""
        self._arrivals = arrivals

    def wait(self) -> None:
        """Wait until every tensor has arrived; raise the device's error if it failed."""
        for event in self._arrivals:
            event.synchronize()
        self._arrivals = []

    def clear(self) -> None:
        self._used = 0

    def read(self, begin: int, num_bytes: int) -> memoryview:
        """Return bytes that have arrived; they are valid until the chunk is cleared."""
        return view_memory(self.memory[begin : begin + num_bytes])


class ArrivedBytes:
    """The bytes of a tensor that has arrived: whole, or in parts that can be read only once."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int, parts: memoryview | Iterator[memoryview]
    ) -> None:
        self.shape, self.dtype, self.num_bytes = shape, dtype, num_bytes
        self._parts = parts
        self.is_read_once = not isinstance(parts, memoryview)

    def parts(self) -> Iterable[memoryview]:
        return (self._parts,) if isinstance(self._parts, memoryview) else self._parts

    @property
    def sample(self) -> BytesSample:
        assert isinstance(self._parts, memoryview), "bytes that are read once have no sample"
        return take_sample(self.num_bytes, self._parts)


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
        """A few of its bytes, which different tensors rarely share."""
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
