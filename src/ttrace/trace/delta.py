"""Packed chunks of an archive: every tensor as its difference to the reference's, compressed.

A chunk is divided into segments: the bytes of a tensor, or what lies between two. A tensor's bits are combined by xor
with those that the reference has in the same place, and compressed with the last byte of every element first, then the
one before it: where a run differs by rounding alone, most of these bytes are zero.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from ttrace.errors import TraceError
from ttrace.files import open_regular, read_file
from ttrace.trace.documents import validate
from ttrace.trace.format import Count, Record
from ttrace.trace.storage.tensor_bytes import view_memory
from ttrace.trace.store import Place
from ttrace.untrusted import check_memory
from ttrace.values.checksum import compute_checksum

INDEX = "archive.json"

Base = Callable[[Record], torch.Tensor | None]
"""Returns the tensor against which a record is packed, of its shape and dtype; None for nothing."""


class Segment(NamedTuple):
    """Some bytes of a chunk, and where they are in the packed file."""

    begin: Count
    end: Count
    at: Count
    num_packed: Count
    checksum: Count
    """CRC-32C of the unpacked bytes: with another reference than the one used for packing, they would differ."""
    order: Count | None
    """The order of the first record that has these bytes; None if none has."""


class Index(BaseModel):
    """The segments of all chunks of a rank; end to end they are the chunks, byte for byte."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunks: tuple[tuple[Segment, ...], ...]


class PackedChunks:
    """The chunks of a rank that was archived."""

    def __init__(self, folder: Place, records: Sequence[Record], base: Base) -> None:
        self._folder, self._records, self._base = folder, records, base

    @property
    def num_chunks(self) -> int:
        return len(self._index.chunks)

    def read_chunk(self, number: int) -> Iterator[torch.Tensor]:
        """Read all segments of a chunk, in order."""
        return (self._unpack_segment(number, segment) for segment in self._index.chunks[number])

    def read_stored(self, record: Record) -> torch.Tensor:
        """Read what a record stores."""
        place = (record.chunk, record.begin, record.end)
        if place not in self._segments:
            raise TraceError(f"{record.id}: {self._folder / INDEX} has nothing where its data should be.")
        segment = self._segments[place]
        if segment.checksum != record.crc:
            raise TraceError(f"{record.id}: {self._folder / INDEX} is not the index of this trace. Trace again.")
        shape, dtype = record.stored_form
        return _bits(self._unpack_segment(record.chunk, segment)).view(dtype).view(shape)

    @cached_property
    def _index(self) -> Index:
        where = self._folder / INDEX
        try:
            data = read_file(where) if isinstance(where, Path) else where.read_bytes()
            return validate(Index, data.decode(), str(where))
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{where} cannot be read ({error}).") from None

    @cached_property
    def _segments(self) -> dict[tuple[int, int, int], Segment]:
        return {
            (number, segment.begin, segment.end): segment
            for number, segments in enumerate(self._index.chunks)
            for segment in segments
        }

    def _unpack_segment(self, number: int, segment: Segment) -> torch.Tensor:
        path = self._folder / packed_file(number)
        where = f"{path}: bytes {segment.begin} to {segment.end} of the chunk"
        check_memory(where, segment.end - segment.begin)
        base, width = None, 1
        if segment.order is not None and segment.order < len(self._records):
            record = self._records[segment.order]
            base, width = self._base(record), record.stored_form[1].itemsize
        try:
            data = _read_bytes(path, segment.at, segment.at + segment.num_packed)
            found = unpack(data, segment.end - segment.begin, width, base)
        except (OSError, zlib.error, RuntimeError, ValueError, OverflowError, MemoryError) as error:
            raise TraceError(f"{where} cannot be unpacked ({error}).") from None
        if compute_checksum(found) != segment.checksum:
            raise TraceError(
                f"{where} are not what was archived: the trace to which they are a difference was made again, or one "
                "of the two is damaged. Run again."
            )
        return found


def packed_file(number: int) -> str:
    return f"chunk-{number:04d}.packed"


def pack(data: torch.Tensor, base: torch.Tensor | None) -> bytes:
    """Compress a tensor's bits as their difference to those of a base, a tensor of the same form."""
    planes = _xor(_bits(data), base).view(-1, data.element_size()).t().flip(0).contiguous()
    squeeze = zlib.compressobj(1, wbits=-zlib.MAX_WBITS, strategy=zlib.Z_RLE)
    return squeeze.compress(view_memory(planes)) + squeeze.flush()


def unpack(data: bytearray, num_bytes: int, width: int, base: torch.Tensor | None) -> torch.Tensor:
    """Restore the bytes of elements of this width; the base is the one that was used for packing."""
    squeezed = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    planes = bytearray(squeezed.decompress(data, num_bytes + 1))  # never more, whatever they would become
    if len(planes) != num_bytes or not squeezed.eof:
        raise ValueError(f"there are {'more' if len(planes) > num_bytes else len(planes)} of them")
    return _xor(torch.frombuffer(planes, dtype=torch.uint8).view(width, -1).flip(0).t().reshape(-1), base)


def _xor(bits: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    return bits if base is None else bits ^ _bits(base)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as its bytes, row major."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _read_bytes(path: Place, begin: int, end: int) -> bytearray:
    if not isinstance(path, Path):
        return path.read(begin, end)
    with os.fdopen(open_regular(path), "rb") as file:
        if end > (size := os.fstat(file.fileno()).st_size):
            raise ValueError(f"the file ends at {size}, before {end}")
        file.seek(begin)
        return bytearray(file.read(end - begin))
