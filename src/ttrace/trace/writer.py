"""This module writes one rank's trace while the step runs.

Order is what makes a killed writer harmless: a tensor's bytes are handed to the kernel before the line that names
them, so every complete line of records.jsonl speaks of bytes that are there. Chunks become ordinary safetensors files
when they are closed: room for the header is reserved in front, and the header is filled in last.
"""

from __future__ import annotations

import json
import os
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path

import torch

from ttrace.errors import TraceError
from ttrace.trace.format import (
    DTYPE_NAMES,
    END,
    MANIFEST,
    RECORDS,
    End,
    Manifest,
    Record,
    check,
    chunk_file,
    encode_at,
    rank_folder,
    spelled,
)
from ttrace.trace.source import Sample, Source

CHUNK_BYTES = 256 << 20
HEADER_BYTES = 256 << 10
"""Reserved in front of every chunk: the 8 bytes of length and the JSON header, padded with spaces."""
MAX_BYTES_HELD = 64 << 20
"""What may be copied at once of a tensor that does not lie in the host's memory, or not in order."""
_LEAST_SHARED = 4096
"""Smaller tensors are written again sooner than they are looked up."""
_WRITE_BYTES = 256 << 10
"""For one call. More at once makes the kernel look for larger pages: up to three times the CPU time was measured."""
_READ_BYTES = 64 << 10
"""For one comparison: what was read is still in the cache."""


class Writer:
    """Appends records to the trace of one rank; `close` says that it is complete."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        max_bytes_held: int = MAX_BYTES_HELD,
    ) -> None:
        self.folder = folder / rank_folder(manifest.rank)
        self.folder.mkdir(parents=True, exist_ok=True)
        # An earlier trace in this folder ends here, its end first: a killed rerun must not look complete.
        for old in (self.folder / END, self.folder / RECORDS, *self.folder.glob("chunk-*.safetensors")):
            old.unlink(missing_ok=True)
        _write_whole(self.folder / MANIFEST, manifest.model_dump_json(indent=1))
        self._records = (self.folder / RECORDS).open("wb", buffering=0)
        self._records_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._max_bytes_held = max_bytes_held
        self._chunk: _Chunk | None = None
        self._num_chunks = 0
        self._num_records = 0

    def write(self, record: Record, tensor: torch.Tensor) -> None:
        """Append one tensor; `record` says everything but its order and where its bytes are."""
        check(record)
        if tensor.dtype not in DTYPE_NAMES:
            raise TraceError(
                f"{record.id}: a trace holds no {tensor.dtype}. Leave this tensor out, or record its parts."
            )
        assert (record.shape, record.dtype) == (tensor.shape, tensor.dtype), "a record speaks of its tensor"
        source = Source(tensor.detach(), self._max_bytes_held)
        name = quoted(str(record.id))
        chunk = self._chunk_for(name, source)
        begin = chunk.place_of(source)
        if begin is None:
            begin = chunk.append(name, source)
        at = (chunk.number, begin, begin + source.num_bytes)
        line = encode_at(record, self._num_records, at).encode() + b"\n"
        _write_at(self._records.fileno(), self._records_bytes, line)
        self._records_bytes += len(line)
        self._num_records += 1

    def close(self, end: End) -> None:
        """Complete the trace; the number of records is filled in here."""
        self._close_chunk()
        self._records.truncate(self._records_bytes)
        os.fsync(self._records.fileno())
        self._records.close()
        whole = end.model_copy(update={"num_records": self._num_records})
        _write_whole(self.folder / END, whole.model_dump_json(indent=1))

    def _chunk_for(self, name: str, source: Source) -> _Chunk:
        if self._chunk is not None and not self._chunk.has_room(name, source, self._chunk_bytes):
            self._close_chunk()
        if self._chunk is None:
            self._chunk = _Chunk(self.folder / chunk_file(self._num_chunks), self._num_chunks)
            self._num_chunks += 1
            if not self._chunk.has_room(name, source, self._chunk_bytes):
                raise TraceError(
                    f"{name[1:80]}...: a name of {len(json.loads(name))} letters is too long for a chunk's header."
                )
        return self._chunk

    def _close_chunk(self) -> None:
        if self._chunk is not None:
            self._chunk.close()
            self._chunk = None


class _Chunk:
    """One safetensors file under construction."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._size = 0
        self._entries: list[str] = []
        self._names: set[str] = set()
        self._header_bytes = 64
        self._places: dict[Sample, int] = {}
        self._scratch = bytearray(_READ_BYTES)

    def has_room(self, name: str, source: Source, chunk_bytes: int) -> bool:
        """Whether this tensor still fits; names are given as JSON spells them."""
        fits = self._size + source.num_bytes <= chunk_bytes or self._size == 0
        # Twice an entry: one for the tensor, one for the padding in front of it.
        entries = len(name) + 24 * len(source.shape) + 2 * 128
        return fits and self._header_bytes + entries < HEADER_BYTES

    def place_of(self, source: Source) -> int | None:
        """Where these very bytes stand already: one module's output is often the next one's input.

        They are compared. Neither a tensor's address nor its version would prove anything: memory is reused, and
        collectives change a tensor without counting
        (tests/trace/test_writer.py::test_bytes_that_changed_without_a_new_version_are_written_anew).
        """
        if source.num_bytes < _LEAST_SHARED:
            return None
        begin = self._places.get(source.sample)
        return begin if begin is not None and self._holds(source, begin) else None

    def append(self, name: str, source: Source) -> int:
        """Write the bytes and return the place in the file where they begin."""
        if padding := -self._size % 8:
            # safetensors allows no holes, so what aligns the next tensor is a tensor too.
            _write_at(self._file, HEADER_BYTES + self._size, bytes(padding))
            self._enter(f'"_padding.{self._size}"', torch.uint8, (padding,), padding)
        begin = at = HEADER_BYTES + self._size
        for part in source.parts():
            _write_at(self._file, at, part)
            at += len(part)
        self._enter(name, source.dtype, source.shape, source.num_bytes)
        if source.num_bytes >= _LEAST_SHARED:
            self._places[source.sample] = begin
        return begin

    def close(self) -> None:
        header = f'{{"__metadata__":{{"format":"pt"}}{"".join(self._entries)}}}'.encode()
        room = HEADER_BYTES - 8
        assert len(header) <= room, "the header would run into the data"
        _write_at(self._file, 0, room.to_bytes(8, "little") + header.ljust(room))
        os.truncate(self._file, HEADER_BYTES + self._size)
        os.fsync(self._file)
        os.close(self._file)

    def _enter(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int) -> None:
        # No id holds a space, so this is no other tensor's name.
        key = name if name not in self._names else f'{name[:-1]} #{len(self._names)}"'
        self._names.add(key)
        entry = f'{spelled(dtype, shape)},"data_offsets":[{self._size},{self._size + num_bytes}]'
        self._entries.append(f",{key}:{{{entry}}}")
        self._header_bytes += len(self._entries[-1])
        self._size += num_bytes

    def _holds(self, source: Source, begin: int) -> bool:
        for part in source.parts():
            for start in range(0, len(part), _READ_BYTES):
                wanted = part[start : start + _READ_BYTES]
                # A bytearray compares at the speed of memory; two memoryviews do it byte by byte.
                found = self._scratch if len(wanted) == _READ_BYTES else bytearray(len(wanted))
                if os.preadv(self._file, [found], begin + start) != len(wanted) or found != wanted:
                    return False
            begin += len(part)
        return True


def _write_at(file: int, at: int, data: bytes | memoryview) -> None:
    # At a stated place, so that what an earlier write left half done on a full disk is written over
    # (tests/trace/test_writer.py::test_a_failed_write_costs_that_record_only).
    view = memoryview(data)
    while view:
        num_bytes = os.pwrite(file, view[:_WRITE_BYTES], at)
        view, at = view[num_bytes:], at + num_bytes


def _write_whole(path: Path, text: str) -> None:
    """Appears at once and complete, or not at all; on disk only after all that the folder had before."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    temporary.replace(path)
