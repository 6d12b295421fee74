"""Pinned memory through which tensors of accelerators reach the host while training goes on.

A tensor is copied on a stream of its own device, which waits for the stream that produced it. Several tensors share a
chunk, and one event tells that all of them have arrived, so that the thread which writes them waits once per chunk. The
thread that trains never waits for the device: only for a free chunk, if more is recorded than can be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

import torch

from ttrace.trace.storage.tensor_bytes import BytesSample, take_sample, view_memory

DEVICE_ERRORS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""Errors of a device, which are the training script's own: torch reports them at some later call. Since torch 2.8."""
_ALIGNED = 16
_WITHOUT_STREAMS = ("cpu", "mps")
"""Devices whose tensors are read at once: the host, and those without streams and pinned memory."""


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a device that works behind the host's back."""
    return tensor.device.type not in _WITHOUT_STREAMS


class Change(Enum):
    """When a tensor may be changed in place, after it was given away to be copied."""

    SOON = "soon"
    """At once: it is copied on the device first."""
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
