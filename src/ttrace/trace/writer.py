"""This module writes one rank's trace while the step runs.

Order is what makes a killed writer harmless: a tensor's bytes are handed to the kernel before the line that names
them, so every complete line of records.jsonl speaks of bytes that are there. Chunks become ordinary safetensors files
when they are closed: room for the header is reserved in front, and the header is filled in last.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

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
    encode,
    rank_folder,
)

CHUNK_BYTES = 256 << 20
HEADER_BYTES = 256 << 10
"""Reserved in front of every chunk: the 8 bytes of length and the JSON header, padded with spaces."""


class Writer:
    """Appends records to the trace of one rank; `close` says that it is complete."""

    def __init__(self, folder: Path, manifest: Manifest, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.folder = folder / rank_folder(manifest.rank)
        self.folder.mkdir(parents=True, exist_ok=True)
        # An earlier trace in this folder ends here, its end first: a killed rerun must not look complete.
        for old in (self.folder / END, self.folder / RECORDS, *self.folder.glob("chunk-*.safetensors")):
            old.unlink(missing_ok=True)
        _write_whole(self.folder / MANIFEST, manifest.model_dump_json(indent=1))
        self._records = (self.folder / RECORDS).open("wb", buffering=0)
        self._records_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._chunk: _Chunk | None = None
        self._num_chunks = 0
        self._num_records = 0

    def write(self, record: Record, tensor: torch.Tensor) -> None:
        """Append one tensor; `record` says everything but its order and where its bytes are."""
        check(record)
        data = tensor.detach().to("cpu").contiguous().resolve_neg()
        if data.dtype not in DTYPE_NAMES:
            raise TraceError(f"{record.id}: a trace holds no {data.dtype}. Leave this tensor out, or record its parts.")
        assert (record.shape, record.dtype) == (data.shape, data.dtype), "a record speaks of its tensor"
        name = str(record.id)
        chunk = self._chunk_for(name, data)
        begin = chunk.append(name, data)
        placed = replace(record, order=self._num_records, chunk=chunk.number, begin=begin, end=begin + data.nbytes)
        line = encode(placed).encode() + b"\n"
        _write_at(self._records, self._records_bytes, line)
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

    def _chunk_for(self, name: str, data: torch.Tensor) -> _Chunk:
        if self._chunk is not None and not self._chunk.has_room(name, data, self._chunk_bytes):
            self._close_chunk()
        if self._chunk is None:
            self._chunk = _Chunk(self.folder / chunk_file(self._num_chunks), self._num_chunks)
            self._num_chunks += 1
            if not self._chunk.has_room(name, data, self._chunk_bytes):
                raise TraceError(f"{name[:80]}...: a name of {len(name)} letters is too long for a chunk's header.")
        return self._chunk

    def _close_chunk(self) -> None:
        if self._chunk is not None:
            self._chunk.close()
            self._chunk = None


class _Chunk:
    """One safetensors file under construction."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._file = path.open("wb", buffering=0)
        self._size = 0
        self._entries: dict[str, dict[str, object]] = {}
        self._header_bytes = 64

    def has_room(self, name: str, data: torch.Tensor, chunk_bytes: int) -> bool:
        fits = self._size + data.nbytes <= chunk_bytes or self._size == 0
        # Twice an entry: one for the tensor, one for the padding in front of it.
        entries = len(json.dumps(name)) + 24 * data.ndim + 2 * 128
        return fits and self._header_bytes + entries < HEADER_BYTES

    def append(self, name: str, data: torch.Tensor) -> int:
        """Write the bytes and return the place in the file where they begin."""
        if padding := -self._size % 8:
            # safetensors allows no holes, so what aligns the next tensor is a tensor too.
            self._enter(f"_padding.{self._size}", "U8", (padding,), bytes(padding))
        begin = HEADER_BYTES + self._size
        self._enter(name, DTYPE_NAMES[data.dtype], tuple(data.shape), _bytes_of(data))
        return begin

    def close(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        assert len(header) <= room, "the header would run into the data"
        _write_at(self._file, 0, room.to_bytes(8, "little") + header.ljust(room))
        self._file.truncate(HEADER_BYTES + self._size)
        os.fsync(self._file.fileno())
        self._file.close()

    def _enter(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> None:
        _write_at(self._file, HEADER_BYTES + self._size, data)
        # No id holds a space, so this is no other tensor's name.
        key = name if name not in self._entries else f"{name} #{len(self._entries)}"
        entry: dict[str, object] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [self._size, self._size + len(data)],
        }
        self._entries[key] = entry
        self._size += len(data)
        self._header_bytes += len(json.dumps({key: entry}))


def _bytes_of(data: torch.Tensor) -> memoryview | bytes:
    """The tensor's memory without a copy and without numpy, which knows neither bfloat16 nor float8."""
    if data.nbytes == 0:
        return b""
    return memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")


def _write_at(file: BinaryIO, at: int, data: bytes | memoryview) -> None:
    # At a stated place, so that what an earlier write left half done on a full disk is written over
    # (tests/trace/test_writer.py::test_a_failed_write_costs_that_record_only).
    file.seek(at)
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


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
