"""The reader: lazy, and plain about what a trace lacks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.rank_traces import manifest, normal, record_of, tensor_id, write_trace
from ttrace.errors import TraceError
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Record, parse_end, seal_model
from ttrace.trace.rank import RankTrace
from ttrace.trace.reader import Trace
from ttrace.trace.seal import open_document, seal_document, seal_line, sum_of
from ttrace.trace.writer import HEADER_BYTES, Writer


def rewrite(folder: Path, **change: object) -> None:
    """Write the first record's line anew, as a writer that means something else would."""
    records, end = folder / "records.jsonl", folder / "end.json"
    first, *rest = records.read_text().splitlines(keepends=True)
    entry = {key: value for key, value in json.loads(first).items() if key != "sum"}
    records.write_text("".join([seal_line(json.dumps({**entry, **change})) + "\n", *rest]))
    known = parse_end(end.read_text(), "end.json")
    end.write_text(seal_model(known.model_copy(update={"records_sum": sum_of(records.read_bytes())})))


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_writing_to_a_read_tensor_changes_no_file(tmp_path: Path) -> None:
    original = torch.randn(1000)
    folder = write_trace(tmp_path, {"layer": original})
    chunk = folder / "chunk-0000.safetensors"
    before = chunk.read_bytes()
    trace = RankTrace(folder)
    trace.read_stored(trace.records[0]).fill_(7.0)
    assert chunk.read_bytes() == before
    again = RankTrace(folder)
    assert torch.equal(again.read_stored(again.records[0]), original)


def test_tensors_of_one_chunk_share_its_mapping(tmp_path: Path) -> None:
    trace = RankTrace(write_trace(tmp_path, {name: torch.randn(100) for name in "ab"}))
    a, b = trace.records
    assert trace.read_stored(a).data_ptr() == trace.read_stored(a).data_ptr()
    assert trace.read_stored(b).data_ptr() - trace.read_stored(a).data_ptr() == b.begin - a.begin


def test_what_some_modules_have_is_read_alone(tmp_path: Path) -> None:
    tensors = {name: torch.randn(8) for name in ("layer", "layer.fc", "other%2Fone")}
    write_trace(tmp_path, tensors)
    trace = Trace(tmp_path)
    assert len(trace.shards) == 3  # what was read before does not count
    part = trace.only({"layer", "other%2Fone"})
    found = {shards[0].id.name: shards[0].tensor() for shards in part.shards.values()}
    assert {"layer", "other%2Fone"} == found.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
    assert len(trace.shards) == 3


@pytest.mark.parametrize("against", ["", "reference"])
def test_an_archive_of_an_earlier_version_is_refused(tmp_path: Path, against: str) -> None:
    """Version 0.2 wrote `against` into every trace, and the name of another trace only into archives."""
    end = write_trace(tmp_path, {"layer": torch.ones(3)}) / "end.json"
    document = json.loads(open_document(end.read_text(), "end.json"))
    end.write_text(seal_document(json.dumps({**document, "against": against})))
    if not against:
        assert len(Trace(tmp_path).shards) == 1
        return
    sentence = f"{tmp_path} is an archive of TTrace 0.2, which this version does not read. Restore it with TTrace 0.2"
    with pytest.raises(TraceError, match=re.escape(sentence)):
        Trace(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc")
def test_reading_one_record_of_a_big_chunk_reads_that_record_only(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, {"big": torch.empty(0), "small": torch.ones(1000)})
    # The chunk grows to a gigabyte on paper; reading it would show.
    with (folder / "chunk-0000.safetensors").open("r+b") as file:
        file.truncate(1 << 30)
    rewrite(folder, shape=[1 << 27], region=None, at=[0, HEADER_BYTES, HEADER_BYTES + (1 << 29)])
    trace = RankTrace(folder)
    before = resident()
    big, small = trace.records
    assert float(trace.read_stored(small).sum()) == 1000.0
    assert big.num_bytes == 1 << 29
    assert resident() - before < 32 << 20


def test_shards_of_all_ranks_come_together_by_id(tmp_path: Path) -> None:
    whole = Region.whole((6, 4))
    for rank in range(2):
        region = Region((6, 4), (((3 * rank, 3 * rank + 3),), ((0, 4),)))
        writer = Writer(tmp_path, manifest(rank, 2, mesh="tp=2"))
        tensor = normal("layer", region)
        writer.write(record_of("layer", tensor, region), tensor)
        writer.write(record_of(f"only.{rank}", tensor, region), tensor)
        writer.close(End(num_steps=1))
    trace = Trace(tmp_path)
    assert [str(name) for name in trace.shards] == ["0/0/layer/output", "0/0/only.0/output", "0/0/only.1/output"]
    joined = torch.empty(6, 4)
    for shard in trace.shards[tensor_id("layer")]:
        assert shard.record.region is not None
        shard.record.region.put(shard.tensor(), joined)
    assert torch.equal(joined, normal("layer", whole))
    assert [shard.coord["tp"] for shard in trace.shards[tensor_id("layer")]] == [0, 1]
    assert trace.sizes == {"tp": 2, "mb": 1}
    assert list(trace.problems()) == []
    assert len(RankTrace(tmp_path / "rank-00001").records) == 2


def test_what_ranks_state_is_gathered(tmp_path: Path) -> None:
    for rank in range(2):
        stated = {
            "parameters": {f"layers.{rank}.w": True},
            "aliases": {f"head.{rank}": "embed"},
            "notes": ("no dropout",),
        }
        Writer(tmp_path, manifest(rank, 2, mesh="pp=2").model_copy(update=stated)).close(End(num_steps=1))
    trace = Trace(tmp_path)
    assert trace.owners("layers.1.w") == {1}
    assert trace.aliases == {"head.0": "embed", "head.1": "embed"}
    assert trace.notes == ("no dropout",)


def test_an_incomplete_trace_opens_and_says_so(tmp_path: Path) -> None:
    writer = Writer(tmp_path, manifest())
    writer.write(record_of("layer", torch.ones(3)), torch.ones(3))
    writer.flush()
    trace = Trace(tmp_path)
    assert torch.equal(trace.shards[tensor_id("layer")][0].tensor(), torch.ones(3))
    assert list(trace.problems()) == [
        f"{tmp_path}/rank-00000 is incomplete: 1 records, then the run ended without closing it"
    ]
    writer.close(End(num_steps=1))
    assert list(Trace(tmp_path).problems()) == []


def test_what_is_written_later_is_found_by_opening_again(tmp_path: Path) -> None:
    """A chunk may grow after it was mapped."""
    writer = Writer(tmp_path, manifest())
    writer.write(record_of("a", torch.ones(3)), torch.ones(3))
    writer.flush()
    rank = RankTrace(writer.folder)
    rank.read_stored(rank.records[0])
    later = torch.randn(100_000)
    writer.write(record_of("b", later), later)
    writer.flush()
    newer = RankTrace(writer.folder).records[1]
    assert torch.equal(rank.read_stored(newer), later)
    writer.close(End(num_steps=1))


@pytest.mark.parametrize("tail", [b'{"id":"0/0/cut/out', b"\0" * 4096, b"{"], ids=["line", "zeros", "brace"])
def test_a_line_cut_off_in_mid_write_is_no_record(tmp_path: Path, tail: bytes) -> None:
    folder = write_trace(tmp_path, {"layer": torch.ones(3)})
    (folder / "end.json").unlink()
    with (folder / "records.jsonl").open("ab") as file:
        file.write(tail)
    assert len(Trace(tmp_path).ranks[0].records) == 1


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        Writer(tmp_path, manifest(rank, 4, mesh="dp=4")).close(End(num_steps=1))
    (tmp_path / "rank-00003").mkdir()
    assert list(Trace(tmp_path).problems()) == [
        f"{tmp_path}: rank 1 of 4 left no trace",
        f"{tmp_path}: rank 3 of 4 left no trace",
    ]


def test_problems_that_the_rank_reported_are_passed_on(tmp_path: Path) -> None:
    Writer(tmp_path, manifest()).close(End(num_steps=1, problems=("0/0/layer/output could not be recorded",)))
    assert list(Trace(tmp_path).problems()) == ["0/0/layer/output could not be recorded"]


def test_records_lost_after_the_end_was_written_are_noticed(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, {name: torch.ones(3) for name in "abc"})
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    records = folder / "records.jsonl"
    for left, count in ((lines[:2], 2), ([lines[0], lines[2]], 2), ([*lines, lines[2]], 4), (lines[::-1], 3), ([], 0)):
        records.write_text("".join(left))
        with pytest.raises(TraceError, match=f"records.jsonl is damaged: it has {count} lines, but not the 3 lines"):
            _ = Trace(tmp_path).shards
    records.write_text("".join(lines)[:-1])
    with pytest.raises(TraceError, match=r"it has 2 lines, but not the 3 lines that were written.*ttrace run --fresh"):
        _ = Trace(tmp_path).shards
    records.unlink()
    with pytest.raises(TraceError, match="it has 0 lines"):
        _ = Trace(tmp_path).shards


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_without_a_trace_names_the_next_command(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "runs"
    if made:
        (folder / "rank-00000").mkdir(parents=True)
    message = f"{folder} holds no trace. `ttrace trace --out {folder} -- COMMAND` makes one."
    with pytest.raises(TraceError, match=f"^{re.escape(message)}$"):
        Trace(folder)


def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, {name: torch.ones(3) for name in "abc"})
    rewrite(folder, dtype="F4")
    with pytest.raises(TraceError, match="unreadable record"):
        _ = Trace(tmp_path).shards


@pytest.mark.parametrize("finished", [True, False])
def test_a_line_that_changed_is_refused_and_its_tensor_named(tmp_path: Path, finished: bool) -> None:
    """One letter of a layout would move a shard to another place."""
    folder = write_trace(tmp_path, {name: torch.ones(3) for name in "abc"})
    if not finished:
        (folder / "end.json").unlink()
    text = (folder / "records.jsonl").read_text()
    at = text.index('"order":1')
    (folder / "records.jsonl").write_text(text[: at + 8] + "3" + text[at + 9 :])
    with pytest.raises(TraceError, match=r"records\.jsonl is damaged: line 2 \(0/0/b/output\) is not what was written"):
        _ = Trace(tmp_path).shards


def test_bytes_that_changed_are_refused_and_their_tensor_named(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, {name: torch.randn(30) for name in "abc"})
    chunk = folder / "chunk-0000.safetensors"
    written, (a, b, c) = bytearray(chunk.read_bytes()), RankTrace(folder).records
    for at, bit in ((b.begin, 0), (b.begin + 3, 6), (b.end - 1, 7)):
        data = bytearray(written)
        data[at] ^= 1 << bit
        chunk.write_bytes(data)
        rank = RankTrace(folder)
        rank.read_stored(a)
        rank.read_stored(c)
        for _ in range(2):
            with pytest.raises(
                TraceError, match=r"^0/0/b/output: .*chunk-0000\.safetensors are damaged: .*Trace again"
            ):
                rank.read_stored(b)


def test_bytes_are_verified_once(tmp_path: Path) -> None:
    """Reading a tensor again, after its memory was given back, does not take the time again."""
    folder = write_trace(tmp_path, {"layer": torch.randn(3000)})
    rank = RankTrace(folder)
    (record,) = rank.records
    rank.read_stored(record).fill_(7.0)
    assert float(rank.read_stored(record).sum()) == 21000.0
    rank.release(record)
    rank.read_stored(record)


@pytest.mark.parametrize("name", ["manifest.json", "end.json", "records.jsonl"])
@pytest.mark.parametrize("data", [b"\xff\xfe\n", b"{}\n"], ids=["no text", "no fields"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    folder = write_trace(tmp_path, {"layer": torch.ones(3)})
    (folder / name).write_bytes(data)
    with pytest.raises(TraceError):
        _ = Trace(tmp_path).shards


def test_a_missing_empty_or_short_chunk_is_named_when_it_is_needed(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, {"layer": torch.ones(300)})
    chunk = folder / "chunk-0000.safetensors"
    (record,) = RankTrace(folder).records
    whole = chunk.read_bytes()
    for data, message in ((whole[:-1], "ends before its data does"), (b"", "cannot be read"), (None, "cannot be read")):
        chunk.unlink()
        if data is not None:
            chunk.write_bytes(data)
        with pytest.raises(TraceError, match=rf"^0/0/layer/output: .*chunk-0000\.safetensors.*{message}"):
            RankTrace(folder).read_stored(record)
        chunk.touch()


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (0, 2**80)], ids=str)
def test_an_impossible_shape_of_no_bytes_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    trace = RankTrace(write_trace(tmp_path, {"layer": torch.ones(3)}))
    with pytest.raises(TraceError, match="no tensor has shape"):
        trace.read_stored(Record(tensor_id(), shape, torch.float32, None))
