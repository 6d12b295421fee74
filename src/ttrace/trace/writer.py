"""Writer of one rank's trace while the step runs.

The order of writes makes a killed writer harmless: a tensor's bytes are handed to the kernel before the line that names
them, so the bytes of every complete line of records.jsonl are there. Bytes go through an arena, and the lines that name
them wait until it has been written. Chunks become ordinary safetensors files when they are closed: room for the header
is reserved in front, and the header is filled in last.
"""

from __future__ import annotations

import atexit
import json
import os
import zlib
from collections import deque
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path

import torch

from ttrace.errors import TraceError
from ttrace.trace.buffered_file import Arena, BufferedFile, open_lines, write_at
from ttrace.trace.collectives import COLLECTIVES, LedgerFile
from ttrace.trace.format import (
    DTYPE_NAMES,
    END,
    MANIFEST,
    RECORDS,
    End,
    Manifest,
    Record,
    check_region,
    chunk_file,
    rank_folder,
    seal_model,
)
from ttrace.trace.lines import encode_at, encode_form
from ttrace.trace.seal import seal_line
from ttrace.trace.store import Place, Remote, Upload
from ttrace.trace.tensor_bytes import ArrivedBytes, BytesSample, Change, TensorBytes
from ttrace.trace.twin_stats import Counterpart
from ttrace.untrusted import check_inside, replace_file

CHUNK_BYTES = 256 << 20
HEADER_BYTES = 256 << 10
"""Reserved in front of every chunk: the 8 bytes of length and the JSON header, padded with spaces."""
MAX_BYTES_HELD = 64 << 20
"""What recording may hold in memory: the arena, and copies of tensors that are not contiguous in the host's memory."""
BUFFER_BYTES = 8 << 20
"""The size of each of the arena's two buffers; less if only little memory may be held. Twice as much was not faster."""
_LEAST_SHARED = 4096
"""Writing a tensor of fewer bytes again is faster than looking it up."""
_FORMAT = '"__metadata__":{"format":"pt"}'
_ADVICE = "Free the disk or change its permissions, or choose another --out."
_LARGEST_PADDING = 128
"""Characters of a padding's entry in the header, which replaces a tensor's entry if its bytes are lost."""


class Writer:
    """Appends records to the trace of one rank; `close` completes it."""

    def __init__(
        self,
        folder: Place,
        manifest: Manifest,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        max_bytes_held: int = MAX_BYTES_HELD,
        claim: Path | None = None,
        counterpart: Counterpart | None = None,
    ) -> None:
        """Set up a writer.

        With `claim`, that file must contain the manifest's launch whenever this writer is about to change the folder.
        With a counterpart, tensors are compared with it instead of stored, wherever that is possible.
        """
        self._counterpart = counterpart
        self._launch, self._claim = manifest.launch, claim
        self._check_claim()
        place = folder / rank_folder(manifest.rank)
        self._upload: Upload | None = None
        try:
            self._upload = Upload(place) if isinstance(place, Remote) else None
            self.folder = place if isinstance(place, Path) else self._upload.spool  # type: ignore[union-attr]
            self._begin(manifest)
        except (OSError, TraceError) as error:
            self._discard_spool()
            raise TraceError(f"{place} cannot be written, so nothing is traced: {error}. {_ADVICE}") from None
        self._records_bytes = 0
        self._records_crc = 0
        self._num_records = 0
        self._lines: list[bytes] = []
        self._ledger: LedgerFile | None = None
        self._problems: list[str] = []
        self._chunk_bytes = chunk_bytes
        self._arena = Arena(min(BUFFER_BYTES, max_bytes_held // 4))
        self.max_bytes_copied = max(1, max_bytes_held - 2 * self._arena.buffer_bytes)
        """What copies of tensors may take beside the arena."""
        self._chunk: _Chunk | None = None
        self._num_chunks = 0
        self._process = os.getpid()
        atexit.register(self._flush_at_exit)

    def _begin(self, manifest: Manifest) -> None:
        """Begin a trace. An earlier one is removed, its end first: a killed rerun must not look complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        check_inside(self.folder, self.folder.parent)
        old_files = (self.folder / name for name in (END, RECORDS, COLLECTIVES))
        for old in (*old_files, *self.folder.glob("chunk-*"), *self.folder.glob(".*.tmp")):
            old.unlink(missing_ok=True)
        replace_file(self.folder / MANIFEST, seal_model(manifest), is_synced=True)
        if self._upload is not None:
            self._upload.begin()
        self._records = open_lines(self.folder / RECORDS)

    def write(
        self,
        record: Record,
        tensor: torch.Tensor | ArrivedBytes,
        mean: torch.Tensor | None = None,
        change: Change = Change.SOON,  # noqa: ARG002  # it is copied before this returns
    ) -> None:
        """Append one tensor, or its bytes that have arrived from an accelerator and whose record is checked.

        `record` has everything but the order of the line, the place of the bytes, and a sketch's mean. If the bytes
        cannot be written later, when the arena is, that becomes a problem in the trace's end.
        """
        source: TensorBytes | ArrivedBytes
        if isinstance(tensor, torch.Tensor):
            self.check(record, tensor)
            source = TensorBytes(tensor, self.max_bytes_copied)
        else:
            source = tensor
        if mean is not None:
            record = record.with_mean(float(mean))
        for stored, data in self._measure(record, source):
            if data is None:
                self._write_alone(stored)
                continue
            name = quoted(str(stored.id))
            chunk = self._open_chunk(name, data)
            begin, crc = chunk.find_place(data) or chunk.append(name, data)
            chunk.waiting.append((stored, begin, begin + data.num_bytes, crc))
            self._settle(chunk)

    def check(self, record: Record, tensor: torch.Tensor) -> None:
        """Raise an error if a trace cannot hold this tensor."""
        check_region(record)
        if tensor.dtype not in DTYPE_NAMES:
            raise TraceError(
                f"{record.id}: a trace holds no {tensor.dtype}. Leave this tensor out, or record its parts."
            )
        assert record.stored_form == (tensor.shape, tensor.dtype), "a record describes what is stored"

    def _measure(
        self, record: Record, source: TensorBytes | ArrivedBytes
    ) -> Iterable[tuple[Record, TensorBytes | ArrivedBytes | None]]:
        """Measure a tensor against the counterpart; return the records to write, each with its bytes, if it has any."""
        counterpart = self._counterpart
        if counterpart is None or not counterpart.can_measure(record):
            return ((record, source),)
        return (
            (each.record, TensorBytes(each.indices, self.max_bytes_copied) if each.indices.numel() else None)
            for each in counterpart.measure(record, source.parts())
        )

    def write_generated(self, record: Record) -> None:
        """Append a tensor without bytes: a reader generates it from `record.values`."""
        check_region(record)
        assert record.values is not None, "values say what to generate"
        self._write_alone(record)

    def _write_alone(self, record: Record) -> None:
        """Append a record without bytes."""
        if self._chunk is not None:
            self._chunk.waiting.append((record, 0, 0, 0))  # its line follows those before it
            self._settle(self._chunk)
        else:
            self._add_line(record, (self._num_chunks, 0, 0), 0)

    def write_collective(self, line: str) -> None:
        """Append a collective to the ledger, as it was encoded."""
        if self._ledger is None:
            self._check_claim()
            self._ledger = LedgerFile(self.folder)
        self._ledger.append(line)

    def flush(self) -> None:
        """Pass everything so far to the operating system, including the lines."""
        if self._chunk is not None:
            self._chunk.stream.flush()
            self._settle(self._chunk)

    def close(self, end: End) -> None:
        """Complete the trace; the number of records and the problems of writing are filled in here."""
        try:
            self._complete(end)
        except OSError as error:
            raise TraceError(
                f"{self.folder} could not be completed, so it is not a valid trace: {error}. {_ADVICE}"
            ) from None
        except TraceError as error:
            raise error from None  # from a store, whose own traceback would hide the sentence
        finally:
            atexit.unregister(self._flush_at_exit)
            self._records.close()
            self._arena.close()
            self._discard_spool()

    def _complete(self, end: End) -> None:
        self._close_chunk()
        lines = b"".join(self._lines)
        write_at(self._records.fileno(), self._records_bytes, lines)
        self._records.truncate(self._records_bytes + len(lines))
        os.fsync(self._records.fileno())
        if self._upload is not None:
            self._upload.settle()
            self._problems += self._upload.problems
        self._check_claim()
        filled = {
            "num_records": self._num_records,
            "records_sum": f"{self._records_crc:08x}",
            "collectives_sum": "" if self._ledger is None else self._ledger.close(),
            "launch": self._launch,
            "problems": (*end.problems, *self._problems),
        }
        replace_file(self.folder / END, seal_model(end.model_copy(update=filled)), is_synced=True)
        if self._upload is not None:
            self._upload.close()

    def _discard_spool(self) -> None:
        if self._upload is not None:
            self._upload.discard()

    def _check_claim(self) -> None:
        """Refuse to change a folder that a later launch writes: the launch of this process has ended."""
        if self._claim is None:
            return
        try:
            owner = self._claim.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            owner = ""
        if owner != self._launch:
            raise TraceError(
                f"{self._claim.with_suffix('')} belongs to a later launch, or was removed: this process belongs to an "
                "earlier launch that has ended, and writes nothing more."
            )

    def _flush_at_exit(self) -> None:
        """Flush for a script that ends without closing. A fork has the arena, but not the thread that writes it."""
        if os.getpid() == self._process:
            self.flush()

    def _settle(self, chunk: _Chunk) -> None:
        """Write the lines of all records whose bytes have been written, in the order of the records."""
        while chunk.waiting and chunk.waiting[0][2] <= chunk.stream.settled:
            record, begin, end, crc = chunk.waiting.popleft()
            if error := chunk.stream.loss(begin, end):
                self._problems.append(f"{record.id} could not be recorded: {type(error).__name__}: {error}")
            else:
                self._add_line(record, (chunk.number, begin, end), crc)
        if self._lines:
            lines = b"".join(self._lines)
            try:
                write_at(self._records.fileno(), self._records_bytes, lines)
            except OSError:
                return  # they are small, and written again with the next ones; `close` would raise
            self._records_bytes += len(lines)
            self._lines.clear()

    def _add_line(self, record: Record, at: tuple[int, int, int], crc: int) -> None:
        line = seal_line(encode_at(record, self._num_records, at, crc)).encode() + b"\n"
        self._lines.append(line)
        self._records_crc = zlib.crc32(line, self._records_crc)
        self._num_records += 1

    def _open_chunk(self, name: str, source: TensorBytes | ArrivedBytes) -> _Chunk:
        if self._chunk is not None and not self._chunk.has_room(name, source, self._chunk_bytes):
            self._close_chunk()
        if self._chunk is None:
            self._check_claim()
            self._chunk = _Chunk(self.folder / chunk_file(self._num_chunks), self._num_chunks, self._arena)
            self._num_chunks += 1
            if not self._chunk.has_room(name, source, self._chunk_bytes):
                raise TraceError(
                    f"{name[1:80]}...: a name of {len(json.loads(name))} characters does not fit a chunk's header."
                )
        return self._chunk

    def _close_chunk(self) -> None:
        if self._chunk is not None:
            self.flush()
            self._chunk.close()
            if self._upload is not None:
                self._upload.add(self.folder / chunk_file(self._chunk.number))
            self._chunk = None


class _Chunk:
    """One safetensors file under construction."""

    def __init__(self, path: Path, number: int, arena: Arena) -> None:
        self.number = number
        self.stream = BufferedFile(path, HEADER_BYTES, arena)
        self.waiting: deque[tuple[Record, int, int, int]] = deque()
        """Records whose lines are still to be written, with the places of their bytes in the file and their CRC."""
        self._size = 0
        self._entries: list[tuple[str, int, int]] = []
        self._names: set[str] = set()
        self._header_bytes = 64
        self._places: dict[BytesSample, tuple[int, int]] = {}

    def has_room(self, name: str, source: TensorBytes | ArrivedBytes, chunk_bytes: int) -> bool:
        """Whether this tensor still fits; the name is given as JSON text."""
        fits = self._size + source.num_bytes <= chunk_bytes or self._size == 0
        # Twice an entry: one for the tensor, one for the padding in front of it.
        entries = len(name) + 24 * len(source.shape) + 2 * 128
        return fits and self._header_bytes + entries < HEADER_BYTES

    def find_place(self, source: TensorBytes | ArrivedBytes) -> tuple[int, int] | None:
        """Find where exactly these bytes were written before, and their CRC: an output is often the next input.

        The bytes are compared while they are in the arena. Why not address and version of a tensor? Memory is reused,
        and collectives change a tensor without a new version
        (tests/trace/test_writer.py::test_bytes_that_changed_without_a_new_version_are_written_anew).
        """
        if source.num_bytes < _LEAST_SHARED or source.is_read_once:
            return None
        begin, crc = self._places.get(source.sample, (0, 0))
        at = begin
        if not self.stream.reaches(begin) or self.stream.loss(begin, begin + source.num_bytes):
            return None
        for part in source.parts():
            if not self.stream.holds(part, at):
                return None
            at += len(part)
        return begin, crc

    def append(self, name: str, source: TensorBytes | ArrivedBytes) -> tuple[int, int]:
        """Append the bytes, and return where they begin in the file, and their CRC."""
        stream = self.stream
        if unaligned := stream.end % 8:
            stream.append(memoryview(bytearray(8 - unaligned)))
        # safetensors allows no gaps, so padding is a tensor too, and so is a part of a tensor whose copy failed.
        if padding := stream.end - HEADER_BYTES - self._size:
            self._enter(_padding(self._size, self._size + padding), padding)
        begin, crc = stream.end, 0
        for part in source.parts():
            crc = stream.append(part, crc)
        # No id holds a space, so this is no other tensor's name.
        key = name if name not in self._names else f'{name[:-1]} #{len(self._entries)}"'
        self._names.add(key)
        entry = (
            f"{key}:{{{encode_form(source.dtype, source.shape)},{_offsets(self._size, self._size + source.num_bytes)}}}"
        )
        self._enter(entry, source.num_bytes)
        self._header_bytes += max(0, _LARGEST_PADDING - len(entry))
        if source.num_bytes >= _LEAST_SHARED and not source.is_read_once:
            self._places[source.sample] = begin, crc
        return begin, crc

    def close(self) -> None:
        """Fill in the header, once everything has been flushed."""
        entries = (
            _padding(begin, end) if self.stream.loss(HEADER_BYTES + begin, HEADER_BYTES + end) else entry
            for entry, begin, end in self._entries
        )
        header = f"{{{','.join((_FORMAT, *entries))}}}".encode()
        room = HEADER_BYTES - 8
        assert len(header) <= room, "the header would run into the data"
        self.stream.close(room.to_bytes(8, "little") + header.ljust(room))

    def _enter(self, entry: str, num_bytes: int) -> None:
        self._entries.append((entry, self._size, self._size + num_bytes))
        self._header_bytes += len(entry) + 1
        self._size += num_bytes


def _padding(begin: int, end: int) -> str:
    return f'"_padding.{begin}":{{{encode_form(torch.uint8, (end - begin,))},{_offsets(begin, end)}}}'


def _offsets(begin: int, end: int) -> str:
    return f'"data_offsets":[{begin},{end}]'
