"""Archives: traces stored as their difference to the reference, in a fraction of the space.

A rank's `end.json` says whether it is archived, and is replaced atomically: before that its chunks are there, after it
the packed files, and a process that is killed in between leaves both. An archive is read like any trace, only slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from ttrace.errors import TraceError
from ttrace.files import create_file, open_regular, replace_file
from ttrace.trace.delta import INDEX, Index, Segment, pack, packed_file
from ttrace.trace.documents import seal_model
from ttrace.trace.format import END, Record, chunk_file
from ttrace.trace.rank import RankTrace
from ttrace.trace.reader import Trace
from ttrace.trace.seal import seal_document
from ttrace.trace.storage.tensor_bytes import view_memory
from ttrace.values.checksum import compute_checksum

Done = Callable[[], None]
"""Called after every chunk."""


def archive(folder: Path, against: str, done: Done = lambda: None) -> None:
    """Store a trace as its difference to the trace `against` in the same folder."""
    trace, base = Trace(folder), Trace(folder.parent / against)
    for problem in trace.problems():
        raise TraceError(f"only complete traces are archived. {problem}.")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "ttrace-archive") as pool:
        for rank in trace.ranks:
            if rank.packed is None:
                chunks = []
                for segments in pool.map(partial(_pack_chunk, rank, base), range(len(_list_chunks(rank)))):
                    chunks.append(segments)
                    done()
                replace_file(
                    _folder(rank) / INDEX,
                    seal_document(Index(chunks=tuple(chunks)).model_dump_json()),
                    is_synced=True,
                )
                _write_base_name(rank, against)
            for chunk in _list_chunks(rank):
                chunk.unlink()


def restore(folder: Path, done: Done = lambda: None) -> None:
    """Restore the chunks of an archive, byte for byte."""
    for rank in Trace(folder).ranks:
        if rank.packed is not None:
            for number in range(rank.packed.num_chunks):
                with os.fdopen(create_file(_folder(rank) / chunk_file(number)), "wb") as file:
                    for data in rank.packed.read_chunk(number):
                        file.write(view_memory(data))
                    file.flush()
                    os.fsync(file.fileno())
                done()
            _write_base_name(rank, "")
        for packed in (_folder(rank) / INDEX, *_folder(rank).glob("chunk-*.packed")):
            packed.unlink(missing_ok=True)


def _pack_chunk(rank: RankTrace, base: Trace, number: int) -> tuple[Segment, ...]:
    """Pack a chunk into a file beside it."""
    chunk = _folder(rank) / chunk_file(number)
    records = [record for record in rank.records if record.chunk == number]
    segments, at = [], 0
    packed_chunk = _folder(rank) / packed_file(number)
    with os.fdopen(open_regular(chunk), "rb") as source, os.fdopen(create_file(packed_chunk), "wb") as file:
        for begin, end, record in _find_segments(records, chunk.stat().st_size):
            if record is None:
                source.seek(begin)
                data = torch.frombuffer(bytearray(source.read(end - begin)), dtype=torch.uint8)
                packed = pack(data, None)
            else:
                data = rank.read_stored(record)
                packed = pack(data, base.read_base(record))
            order = None if record is None else record.order
            segments.append(Segment(begin, end, at, len(packed), compute_checksum(data), order))
            at += file.write(packed)
            if record is not None:
                rank.release(record)
        file.flush()
        os.fsync(file.fileno())
    return tuple(segments)


def _find_segments(records: Sequence[Record], size: int) -> Iterator[tuple[int, int, Record | None]]:
    """Divide a chunk into segments, each with the first record that has it."""
    first = {(record.begin, record.end): record for record in reversed(records) if record.end > record.begin}
    at = 0
    for (begin, end), record in sorted(first.items(), key=lambda entry: entry[0]):
        if begin < at:
            raise TraceError(f"{record.id}: its bytes are partly those of another tensor.")
        if begin > at:
            yield at, begin, None
        yield begin, end, record
        at = end
    if at < size:
        yield at, size, None


def _list_chunks(rank: RankTrace) -> list[Path]:
    return list(_folder(rank).glob("chunk-*.safetensors"))


def _write_base_name(rank: RankTrace, against: str) -> None:
    assert rank.end is not None
    text = seal_model(rank.end.model_copy(update={"against": against}))
    replace_file(_folder(rank) / END, text, is_synced=True)


def _folder(rank: RankTrace) -> Path:
    assert isinstance(rank.folder, Path), "archives are made on a disk"
    return rank.folder
