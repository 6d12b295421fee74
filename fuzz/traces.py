"""Whole traces: everything that a reader offers is asked for, of a run whose files are hostile."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch

from fuzz.container import Files, mutate_files, pack_files, read_files, seal_files, unpack_files, write_files
from fuzz.documents import COLLECTIVE, END_OF_RANK, MANIFEST
from fuzz.target import Target
from ttrace import untrusted
from ttrace.errors import TTraceError
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.trace.collectives import encode_collective
from ttrace.trace.format import Manifest, Record, SketchInfo
from ttrace.trace.rank import RankTrace
from ttrace.trace.reader import Shard, Trace, UsedShard
from ttrace.trace.writer import HEADER_BYTES, Writer
from ttrace.values.generate import Normal
from ttrace.values.sketch import compute_sketch
from ttrace.values.stats import Stats

_NUM_BUCKETS = 64
_FREE = 2 << 20
"""Bytes: values may take what the machine has free, so inputs are read as on a machine that has little.

Each is read several times, which takes as long as it is large, and what measures coverage keeps the tensors that are
compared.
"""


@patch.object(untrusted, "find_free_memory", lambda: _FREE)
def _run(data: bytes) -> None:
    folder, known = _prepare_folder()
    write_files(unpack_files(data), folder, known)
    traces = [trace for side in ("reference", "candidate") if (trace := _open(folder / side)) is not None]
    for trace in traces:
        for question in _ask(trace):
            with suppress(TTraceError):
                question()


@cache
def _prepare_folder() -> tuple[Path, Files]:
    return Path(tempfile.mkdtemp()), {}


def _open(folder: Path) -> Trace | None:
    try:
        return Trace(folder)
    except TTraceError:
        return None


def _ask(trace: Trace) -> Iterator[Callable[[], object]]:
    """Yield everything that may be asked of a trace; each may be refused."""
    yield from (
        lambda: list(trace.problems()),
        lambda: (trace.notes, trace.identity, trace.flags, trace.random, trace.grad_factor, trace.sizes),
        lambda: (trace.aliases, trace.operations, trace.divided, trace.untraced, trace.reduced, trace.unloaded),
        lambda: (trace.batch_axes, trace.settings, trace.forward_buffers, trace.owners("layers.0")),
        lambda: trace.splits,
        trace.count_sketches,
    )
    for rank in trace.ranks:
        yield partial(_list_groups, trace, rank)
    try:
        shards = [shard for found in trace.shards.values() for shard in found]
    except TTraceError:
        return
    for shard in shards:
        yield from _ask_shard(trace, shard)


def _list_groups(trace: Trace, rank: RankTrace) -> None:
    for one in rank.collectives:
        one.group.list_ranks(trace.mesh, rank.manifest.rank)


def _ask_shard(trace: Trace, shard: Shard) -> Iterator[Callable[[], object]]:
    yield from (
        lambda: trace.is_passed(shard.id),
        lambda: trace.is_opaque(shard.id.name),
        lambda: trace.num_bytes(shard.id),
        shard.read_stored,
        shard.terms,
        lambda: shard.record.region and shard.read_sketch(_NUM_BUCKETS),
        UsedShard(shard.record, shard.coord, shard.rank).tensor,
        shard.release,
    )


def _make_runs() -> Iterable[bytes]:
    """Make a run whose candidate has two ranks, and one in which the candidate did not end."""
    with tempfile.TemporaryDirectory() as scratch:
        files = write_run(Path(scratch))
    yield pack_files(files)
    yield pack_files({path: data for path, data in files.items() if path != "candidate/rank-00001/end.json"})


def write_run(folder: Path) -> Files:
    full = torch.arange(48, dtype=torch.float32).view(8, 6)
    _write_rank(
        folder / "reference", MANIFEST.model_copy(update={"role": "reference", "num_ranks": 1, "mesh": ""}), full
    )
    for rank in range(2):
        _write_rank(folder / "candidate", MANIFEST.model_copy(update={"rank": rank}), full + rank * 0.5)
    return seal_files(_cut_headers(read_files(folder)))


def _write_rank(folder: Path, manifest: Manifest, full: torch.Tensor) -> None:
    writer = Writer(folder, manifest)
    region = Region.whole((8, 6))
    if manifest.num_ranks > 1:
        region = Region((8, 6), (((4 * manifest.rank, 4 * manifest.rank + 4),), ((0, 6),)))
    for name in ("layers.0/output", "layers.0.weight/param", "layers.0.weight/param_after"):
        for dtype in (torch.float32, torch.bfloat16) if name.endswith("output") else (torch.float32,):
            part = region.take(full).to(dtype).contiguous()
            slot = ".0" if dtype == torch.bfloat16 else ""
            writer.write(_make_record(f"0/-/{name}{slot}", part, region), part)
    run = Region.flat_of((8, 6), ((7, 30),))
    part = run.take(full).contiguous()
    writer.write(_make_record("0/-/flat/param_after", part, run), part)
    sketched = _make_record("0/0/wide/output", region.take(full), region)
    sketch = compute_sketch(region.take(full), region, _NUM_BUCKETS)
    writer.write(replace(sketched, sketch=SketchInfo(_NUM_BUCKETS)), sketch)
    compared = replace(sketched, id=TensorId.parse("0/0/measured/output"))
    if manifest.num_ranks > 1:
        stats = Stats(region.numel, 1.0, 1.0)
        writer.write(replace(compared, stats=stats, end=16), torch.tensor([1, 3]))
    else:
        writer.write(compared, full)
    generated = replace(sketched, id=TensorId.parse("0/-/made/param"), values=Normal())
    writer.write_generated(generated)
    writer.write_collective(encode_collective(COLLECTIVE))
    writer.close(END_OF_RANK)


def _make_record(text: str, tensor: torch.Tensor, region: Region) -> Record:
    return Record(TensorId.parse(text), tuple(tensor.shape), tensor.dtype, region)


def _cut_headers(files: Files) -> Files:
    """Leave out the headers of chunks, which no reader reads, so that inputs are short."""
    result = dict(files)
    for path, data in files.items():
        if path.endswith(".safetensors"):
            result[path] = data[HEADER_BYTES:]
        elif path.endswith("records.jsonl"):
            result[path] = re.sub(rb'"at":\[0,([0-9]+),([0-9]+)\]', _move_place, data)
    return result


def _move_place(place: re.Match[bytes]) -> bytes:
    begin, end = (max(0, int(number) - HEADER_BYTES) for number in place.groups())
    return f'"at":{json.dumps([0, begin, end])}'.encode().replace(b" ", b"")


TARGETS = (Target("reader", _run, mutate_files, make_seeds=_make_runs, max_bytes=1 << 16, usual_bytes=1 << 16),)
