"""Writer for tensors on accelerators: they are copied to the host and written while training goes on."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ttrace.trace.format import End, Record
from ttrace.trace.tensor_bytes import DEVICE_ERRORS, ArrivedBytes, Change, CopyStreams, PinnedChunk
from ttrace.trace.writer import Writer

CHUNK_BYTES = 8 << 20
"""The size of a pinned chunk; less if little may be held."""
_LEAST_CHUNKS = 3
"""One is being filled, one is being copied, one is being written."""
_MEAN_BYTES = 4
"""A mean is a float32."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record in a batch, with the form and the place of its bytes."""

    record: Record
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """None for a generated tensor, which has no bytes."""
    num_bytes: int = 0
    begin: int | None = None
    """Where the bytes begin; None if they are in the batches that follow."""
    has_mean: bool = False
    """Whether a mean follows the bytes."""


class _Batch:
    """A chunk with the records in it, in their order."""

    def __init__(self, chunk: PinnedChunk | None) -> None:
        self.chunk = chunk
        self.entries: list[_Entry] = []
        self.part: int = 0
        """The number of bytes of the chunk that continue the tensor of an earlier batch."""


class BackgroundWriter:
    """Passes records to a `Writer` in its own thread, in the order in which they came.

    Its pinned memory counts as memory that the writer may hold. Its methods are called from one thread at a time.
    """

    def __init__(self, writer: Writer, add_problem: Callable[[str], None]) -> None:
        """Set up the thread; `add_problem` is called with what could not be recorded."""
        self._writer = writer
        self._add_problem = add_problem
        self._streams = CopyStreams()
        num_bytes = writer.max_bytes_copied
        self._chunk_bytes = max(1 << 12, min(CHUNK_BYTES, num_bytes // _LEAST_CHUNKS) // 4096 * 4096)
        self._num_chunks = max(_LEAST_CHUNKS, num_bytes // self._chunk_bytes)
        self._num_made = 0
        self._free: list[PinnedChunk] = []
        self._batches: deque[_Batch] = deque()
        self._filled = _Batch(None)
        self._changed = threading.Condition()
        self._is_idle = True
        self._ends = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="ttrace-background", daemon=True)
        self._thread.start()
        atexit.register(self._flush_at_exit)

    def write(
        self, record: Record, tensor: torch.Tensor, mean: torch.Tensor | None = None, change: Change = Change.SOON
    ) -> None:
        """Append one tensor as `Writer.write` does, without waiting for it."""
        self._raise_error()
        self._writer.check(record, tensor)
        flat = _view_bytes(tensor)
        if flat.data_ptr() != tensor.data_ptr():
            change = Change.NEVER  # it is a copy
        num_bytes = flat.numel()
        if num_bytes + _MEAN_BYTES > self._chunk_bytes:
            if mean is not None:
                record = record.with_mean(float(mean))  # of a sketch that is larger than a chunk
            self._append_large(_Entry(record, tuple(tensor.shape), tensor.dtype, num_bytes), flat, change)
            return
        if mean is not None:
            flat = torch.cat((flat, _view_bytes(mean.to(torch.float32))))
        begin = self._append(flat, change)
        self._filled.entries.append(
            _Entry(record, tuple(tensor.shape), tensor.dtype, num_bytes, begin, mean is not None)
        )

    def write_generated(self, record: Record) -> None:
        """Append a tensor without bytes."""
        self._raise_error()
        self._filled.entries.append(_Entry(record))

    def flush(self) -> None:
        """Pass everything so far to the operating system."""
        self._seal()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or (self._is_idle and not self._batches))
        self._raise_error()
        self._writer.flush()

    def close(self, end: End) -> None:
        """Complete the trace, and end the thread."""
        self.flush()
        self._stop()
        self._free.clear()  # a closed trace holds no memory
        self._writer.close(end)

    # In the thread that records

    def _append(self, flat: torch.Tensor, change: Change) -> int:
        """Begin to copy bytes into a chunk with space for them; return where they will be."""
        chunk = self._filled.chunk
        begin = chunk.take(flat.numel()) if chunk is not None else None
        if chunk is None or begin is None:
            if chunk is not None:
                self._seal()
            chunk = self._filled.chunk = self._take_chunk()
            begin = chunk.take(flat.numel())
            assert begin is not None, "a tensor that is not large fits an empty chunk"
        target = chunk.memory[begin : begin + flat.numel()]
        if flat.is_cpu:
            target.copy_(flat)
        elif flat.numel():
            self._streams.copy(flat, target, change)
        return begin

    def _append_large(self, entry: _Entry, flat: torch.Tensor, change: Change) -> None:
        """Begin to copy a tensor that does not fit a chunk: each part in its own batch."""
        self._filled.entries.append(entry)
        for part in flat.split(self._chunk_bytes):
            self._seal()
            self._append(part, change)
            self._filled.part = part.numel()
        self._seal()

    def _take_chunk(self) -> PinnedChunk:
        with self._changed:
            if not self._free and self._num_made < self._num_chunks:
                self._num_made += 1
                return PinnedChunk(self._chunk_bytes)
            self._changed.wait_for(lambda: self._error is not None or self._free)
            self._raise_error()
            return self._free.pop()

    def _seal(self) -> None:
        """Pass the batch so far to the thread that writes."""
        batch, self._filled = self._filled, _Batch(None)
        if batch.chunk is not None:
            batch.chunk.seal(self._streams.record_events())
        with self._changed:
            self._batches.append(batch)
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        atexit.unregister(self._flush_at_exit)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _flush_at_exit(self) -> None:
        """Flush for a script that ends without closing; a fork has no thread that writes."""
        if os.getpid() == self._process and self._error is None:
            self.flush()

    # In the thread that writes

    def _work(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                for entry in batch.entries:
                    self._write_entry(batch, entry)
                self._release(batch)
        except BaseException as error:  # an error of the device: the thread that trains raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_batch(self) -> _Batch | None:
        """Wait for the next batch and for its tensors; None at the end."""
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._batches or self._ends)
            if not self._batches:
                return None
            self._is_idle = False
            batch = self._batches.popleft()
        if batch.chunk is not None:
            batch.chunk.wait()
        return batch

    def _write_entry(self, batch: _Batch, entry: _Entry) -> None:
        try:
            if entry.dtype is None:
                self._writer.write_generated(entry.record)
            else:
                record, parts = self._read(batch, entry)
                self._writer.write(record, ArrivedBytes(entry.shape, entry.dtype, entry.num_bytes, parts))
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # as in Recorder, it is reported at the end of the trace
            self._add_problem(f"{entry.record.id} could not be recorded: {type(error).__name__}: {error}")

    def _read(self, batch: _Batch, entry: _Entry) -> tuple[Record, memoryview | Iterator[memoryview]]:
        """Read a record's bytes, and complete it with the mean if that was on the device."""
        if entry.begin is None:
            return entry.record, self._read_parts(entry.num_bytes)
        assert batch.chunk is not None
        record, end = entry.record, entry.begin + entry.num_bytes
        if entry.has_mean:
            (mean,) = batch.chunk.read(end, _MEAN_BYTES).cast("f")
            record = record.with_mean(mean)
        return record, batch.chunk.read(entry.begin, entry.num_bytes)

    def _read_parts(self, num_bytes: int) -> Iterator[memoryview]:
        """Read a large tensor from the chunks that follow."""
        while num_bytes:
            batch = self._next_batch()
            assert batch is not None
            assert batch.chunk is not None
            num_bytes -= batch.part
            yield batch.chunk.read(0, batch.part)
            self._release(batch)

    def _release(self, batch: _Batch) -> None:
        if batch.chunk is not None:
            batch.chunk.clear()
            with self._changed:
                self._free.append(batch.chunk)
                self._changed.notify_all()


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in row-major order, on its device; a copy if they are not in that order."""
    return tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
