"""Reader of one rank's trace. It raises TraceError for anything that was changed after it was written."""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from functools import cached_property
from pathlib import Path

import torch

from ttrace.errors import TraceError
from ttrace.trace.agreement import check_end
from ttrace.trace.collectives import COLLECTIVES, Collective, decode_collectives
from ttrace.trace.format import (
    END,
    MANIFEST,
    RECORDS,
    End,
    Manifest,
    Record,
    chunk_file,
    parse_end,
    parse_manifest,
    rank_folder,
)
from ttrace.trace.lines import decode_quickly
from ttrace.trace.seal import TRACE_AGAIN, is_intact, seal_of, strip_seal, sum_of
from ttrace.trace.store import Place, Remote
from ttrace.untrusted import Limits, check_inside, check_memory, open_regular, read_file
from ttrace.values.checksum import compute_checksum
from ttrace.values.generate import generate_values

_ID = re.compile(r'"id":"([!-~]{1,200}?)"')
_NAME = re.compile(r'\{"id":"[0-9]+/[0-9-]+/([^/@"\\]+)[/@]')


class RankTrace:
    """The trace of one rank."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._names: AbstractSet[str] | None = None
        """The modules and parameters whose records are read; None for all."""
        self._records: tuple[Record, ...] | None = None
        manifest, text = _read_text(folder / MANIFEST), _read_text_if_any(folder / END)
        self.manifest: Manifest = parse_manifest(manifest, str(folder / MANIFEST))
        self.end: End | None = None if text is None else parse_end(text, str(folder / END))
        self.seals = seal_of(manifest) + seal_of(text or "")
        if folder.name != rank_folder(self.manifest.rank):
            raise TraceError(f"{folder} holds the trace of rank {self.manifest.rank}. Trace again.")
        if self.end is not None:
            if self.end.against:
                raise TraceError(
                    f"{folder.parent} is an archive of TTrace 0.2, which this version does not read. Restore it with "
                    "TTrace 0.2, or trace again."
                )
            check_end(str(folder / END), self.end)
        self._maps: dict[int, mmap.mmap] = {}
        self._verified: set[tuple[int, int, int]] = set()

    @property
    def records(self) -> tuple[Record, ...]:
        """Every complete record, in order of appearance."""
        if self._records is None:
            self._records = self._read_records()
        return self._records

    def _read_records(self) -> tuple[Record, ...]:
        path = self.folder / RECORDS
        data = _read_bytes_if_any(path, Limits.get().lines_bytes) or b""
        # Text after the last newline belongs to a write that was interrupted.
        lines = _decode(data, path).split("\n")[:-1]
        if self.end is None or sum_of(data) != self.end.records_sum:
            self._check_lines(lines)
        return tuple(decode_quickly(strip_seal(line)) for line in lines if self._is_read(line))

    def only(self, names: AbstractSet[str]) -> RankTrace:
        """Return this rank with the records of these modules and parameters only; other records are not decoded."""
        part = copy(self)  # it shares the files that are mapped
        part._names, part._records = names, None
        return part

    def _is_read(self, line: str) -> bool:
        if self._names is None:
            return True
        match = _NAME.match(line)
        return match is None or match[1] in self._names

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The ledger: the collectives and messages of this rank, in order."""
        path = self.folder / COLLECTIVES
        data = _read_bytes_if_any(path, Limits.get().lines_bytes)
        if data is None:
            if self.end is not None and self.end.collectives_sum:
                raise TraceError(f"{path} cannot be read: it is not there. {TRACE_AGAIN}")
            return ()
        return decode_collectives(data, str(path), None if self.end is None else self.end.collectives_sum)

    def _check_lines(self, lines: Sequence[str]) -> None:
        """Raise TraceError for lines that were changed; if the rank finished, none may be missing."""
        path = self.folder / RECORDS
        for number, line in enumerate(lines, 1):
            if not is_intact(line):
                named = _ID.search(line)
                about = f" ({named[1]})" if named else ""
                raise TraceError(f"{path} is damaged: line {number}{about} is not what was written. {TRACE_AGAIN}")
        if self.end is not None:
            raise TraceError(
                f"{path} is damaged: it has {len(lines)} lines, but not the {self.end.num_records} lines that were "
                f"written. {TRACE_AGAIN}"
            )

    def read_stored(self, record: Record) -> torch.Tensor:
        """Read the tensor that a record stores; raise TraceError if its bytes were changed."""
        tensor = self.read_unverified(record)
        place = (record.chunk, record.begin, record.end)
        if record.end == record.begin or place in self._verified:  # generated values have no bytes
            return tensor
        checksum = compute_checksum(tensor)
        if checksum != record.crc:
            raise TraceError(
                f"{record.id}: its data in {self.folder / chunk_file(record.chunk)} are damaged: bytes {record.begin} "
                f"to {record.end} have the checksum {checksum:08x}, but {record.crc:08x} was written. {TRACE_AGAIN}"
            )
        if not isinstance(self.folder, Remote):  # bytes of a store are fetched again each time
            self._verified.add(place)
        return tensor

    def read_unverified(self, record: Record) -> torch.Tensor:
        """Read the tensor that a record stores, without verifying its checksum."""
        shape, dtype = record.stored_form
        try:
            count = math.prod(shape)
            if count == 0:
                return torch.empty(shape, dtype=dtype, device="cpu")
            if record.begin == record.end and record.is_generated:
                return self.generate(record)
            if isinstance(self.folder, Remote):
                return torch.frombuffer(self._read(record, self.folder), dtype=dtype, count=count).view(shape)
            memory = self._map(record, self.folder)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=record.begin)
            return flat if len(shape) == 1 else flat.view(shape)
        except (RuntimeError, TypeError, OverflowError):
            raise TraceError(f"{record.id}: no tensor has shape {shape}.") from None

    def generate(self, record: Record) -> torch.Tensor:
        """Generate the values that a record's tensor had before the first step, for its region."""
        assert record.region is not None
        assert record.values is not None
        check_memory(record.id, math.prod(record.region.local_shape) * record.dtype.itemsize)
        # Parameters on the meta device have no updates, so their generated values are the same in every step.
        first = record.id._replace(step=0)
        return generate_values(
            first, record.region, dtype=record.dtype, distribution=record.values, seed=self.manifest.seed
        )

    def release(self, record: Record) -> None:
        """Release the memory of a record's bytes; their file stays mapped."""
        if record.end - record.begin < mmap.PAGESIZE:
            return  # smaller than a page
        memory = self._maps.get(record.chunk)
        if memory is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = -(-record.begin // mmap.PAGESIZE) * mmap.PAGESIZE, record.end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end <= len(memory):  # a damaged record may have any place
            memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _read(self, record: Record, folder: Remote) -> bytearray:
        path = folder / chunk_file(record.chunk)
        try:
            return path.read(record.begin, record.end)
        except OSError as error:
            raise TraceError(f"{record.id}: its data in {path} cannot be read ({error}).") from None

    def _map(self, record: Record, folder: Path) -> mmap.mmap:
        memory = self._maps.get(record.chunk)
        if memory is None or len(memory) < record.end:
            path = folder / chunk_file(record.chunk)
            try:
                check_inside(path, folder.parent)
                with os.fdopen(open_regular(path), "rb") as file:
                    memory = self._maps[record.chunk] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise TraceError(f"{record.id}: its data file {path} cannot be read ({error}). {TRACE_AGAIN}") from None
        if len(memory) < record.end:
            raise TraceError(f"{record.id}: {folder / chunk_file(record.chunk)} ends before its data does.")
        return memory


def _read_text(path: Place) -> str:
    text = _read_text_if_any(path)
    if text is None:
        raise TraceError(f"{path} cannot be read: it is not there.")
    return text


def _read_text_if_any(path: Place) -> str | None:
    data = _read_bytes_if_any(path)
    return None if data is None else _decode(data, path)


def _read_bytes_if_any(path: Place, most: int | None = None) -> bytes | None:
    try:
        if isinstance(path, Remote):
            return path.read_bytes()
        check_inside(path, path.parent.parent)
        return read_file(path, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error}).") from None


def _decode(data: bytes, path: Place) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is damaged: it cannot be read ({error}).") from None
