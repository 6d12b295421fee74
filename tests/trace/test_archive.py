"""Archives: a fraction of the space, the same bits, and never others."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.rank_traces import manifest, record_of, same_bits, tensor_id, write_trace
from ttrace.errors import TraceError
from ttrace.layouts.region import Region
from ttrace.trace import archive as archiving
from ttrace.trace.archive import archive, restore
from ttrace.trace.documents import parse_end, seal_model
from ttrace.trace.format import DTYPES, End, Record, SketchInfo
from ttrace.trace.reader import Trace
from ttrace.trace.store import Remote
from ttrace.trace.writer import Writer
from ttrace.values.stats import Stats


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The same but for a few last bits."""
    nudged = tensor.double() * (1 + torch.randint(-2, 3, tensor.shape) * torch.finfo(tensor.dtype).eps)
    return nudged.to(tensor.dtype)


def assert_kept(folder: Path) -> dict[str, bytes]:
    """An archive of this trace reads as it did, restored it is what it was; returns what was archived."""
    before, trace = contents(folder), Trace(folder)
    stored = [[shard.read_stored().clone() for shard in shards] for shards in trace.shards.values()]
    archive(folder, "reference")
    assert not list(folder.rglob("*.safetensors"))
    archived = contents(folder)
    again = Trace(folder)
    assert list(again.shards) == list(trace.shards)
    for tensors, shards in zip(stored, again.shards.values(), strict=True):
        assert all(same_bits(old, shard.read_stored()) for old, shard in zip(tensors, shards, strict=True))
    restore(folder)
    assert contents(folder) == before
    return archived


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_differs_by_rounding_takes_a_fraction(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"layers.{i}": torch.randn(256, 1024, dtype=torch.float64).to(dtype) for i in range(4)}
    write_trace(tmp_path / "reference", tensors)
    folder = tmp_path / "candidate"
    write_trace(folder, {name: rounded(tensor) for name, tensor in tensors.items()}, chunk_bytes=1 << 20)
    archived = assert_kept(folder)
    num_packed = sum(len(data) for name, data in archived.items() if name.endswith(".packed"))
    # Five equally frequent last bits cannot take less than log2(5), 2.3 bits of each element.
    assert num_packed < 4 * 256 * 1024 * 4.5 / 8 + 20_000


def test_shards_are_differences_to_their_part_of_the_reference(tmp_path: Path) -> None:
    full = torch.randn(64, 4096)
    write_trace(tmp_path / "reference", {"layer": full})
    zigzag, run = (
        Region((64, 4096), (((0, 64),), ((0, 1024), (3072, 4096)))),
        Region.flat_of((64, 4096), ((77, 100_077),)),
    )
    for rank, region in enumerate((zigzag, run)):
        writer = Writer(tmp_path / "candidate", manifest(rank, 2, mesh="tp=2"))
        shard = region.take(full).contiguous()
        writer.write(record_of("layer", shard, region), shard)
        writer.close(End(num_steps=1))
    archived = assert_kept(tmp_path / "candidate")
    assert all(len(data) < 5000 for data in archived.values())  # equal bits are nothing but zeros


def test_a_trace_that_was_measured_against_the_reference_comes_back(tmp_path: Path) -> None:
    """A twin has, in place of values, the indices of some elements: they are no difference to the reference."""
    write_trace(tmp_path / "reference", {"layer": torch.ones(24)})
    writer = Writer(tmp_path / "candidate", manifest())
    record = replace(record_of("layer", torch.ones(24)), stats=Stats(24, 1.0, 1.0), end=16)
    writer.write(record, torch.tensor([1, 3]))
    writer.close(End(num_steps=1))
    assert_kept(tmp_path / "candidate")


@pytest.mark.parametrize("against", ["candidate", "../elsewhere", "/", ".."])
def test_an_archive_is_a_difference_to_another_trace_beside_it(tmp_path: Path, against: str) -> None:
    write_trace(tmp_path / "reference", {"layer": torch.ones(24)})
    end = write_trace(tmp_path / "candidate", {"layer": torch.ones(24)}) / "end.json"
    archive(tmp_path / "candidate", "reference")
    end.write_text(seal_model(parse_end(end.read_text(), "end.json").model_copy(update={"against": against})))
    with pytest.raises(TraceError, match=r"must be the name of a trace beside this one|is an archive too"):
        Trace(tmp_path / "candidate").shards[tensor_id("layer")][0].tensor()


def test_whatever_a_trace_may_hold_comes_back(tmp_path: Path) -> None:
    """All dtypes, scalars, nothing at all, other shapes and dtypes than the reference's, shared bytes, sketches."""
    known = {f"known.{name}": torch.ones(33).to(dtype) for name, dtype in DTYPES.items()}
    write_trace(tmp_path / "reference", {**known, "shape": torch.ones(7), "wide": torch.ones(5000)})
    writer = Writer(tmp_path / "candidate", manifest())
    tensors = {
        **{name: torch.zeros(33).to(tensor.dtype) for name, tensor in known.items()},
        "scalar": torch.tensor(math.nan),
        "empty": torch.empty(0, 3),
        "shape": torch.randn(5, 5),
        "wide": torch.randn(5000).to(torch.float8_e5m2),
    }
    for name, tensor in tensors.items():
        writer.write(record_of(name, tensor), tensor)
    shared = torch.randn(2048)
    for name in ("first", "second"):
        writer.write(Record(tensor_id(name), (2048,), torch.float32, None), shared)
    sums = torch.randn(1024, dtype=torch.float64)
    whole = Region.whole((1000, 1000))
    writer.write(Record(tensor_id("known.F32"), whole.shape, torch.bfloat16, whole, sketch=SketchInfo(1024)), sums)
    writer.close(End(num_steps=1))
    assert_kept(tmp_path / "candidate")


def pair(folder: Path) -> tuple[Path, torch.Tensor]:
    data = torch.randn(1000)
    write_trace(folder / "reference", {"layer": data})
    write_trace(folder / "candidate", {"layer": rounded(data)})
    return folder / "candidate", data


def test_another_reference_is_noticed_and_does_not_make_other_values(tmp_path: Path) -> None:
    candidate, _ = pair(tmp_path)
    archive(candidate, "reference")
    write_trace(tmp_path / "reference", {"layer": torch.randn(1000)})
    shard = Trace(candidate).shards[tensor_id()][0]
    with pytest.raises(TraceError, match=r"chunk-0000\.packed: bytes .* are not what was archived.*was made again"):
        shard.tensor()
    with pytest.raises(TraceError, match="not what was archived"):
        restore(candidate)
    assert Trace(candidate).ranks[0].packed is not None


@pytest.mark.parametrize(
    "damage", ["cut off", "other bytes", "no file", "no index", "half an index", "other index", "far away", "no text"]
)
def test_damage_is_told(tmp_path: Path, damage: str) -> None:
    candidate, _ = pair(tmp_path)
    archive(candidate, "reference")
    packed, index = (candidate / "rank-00000" / name for name in ("chunk-0000.packed", "archive.json"))
    match damage:
        case "cut off":
            packed.write_bytes(packed.read_bytes()[:-100])
        case "other bytes":
            packed.write_bytes(bytes(len(packed.read_bytes())))
        case "no file":
            packed.unlink()
        case "no index":
            index.unlink()
        case "half an index":
            index.write_text(index.read_text()[:-50])
        case "far away":
            chunks = json.loads(index.read_text())["chunks"]
            moved = [[[begin, end, 2**70, *rest] for begin, end, _, *rest in segments] for segments in chunks]
            index.write_text(json.dumps({"chunks": moved}))
        case "no text":
            index.write_bytes(b"\xff")
        case _:
            index.write_text(json.dumps({"chunks": []}))
    with pytest.raises(TraceError, match=r"rank-00000"):
        Trace(candidate).shards[tensor_id()][0].tensor()


@pytest.mark.parametrize("change", [archive, restore])
@pytest.mark.parametrize("moment", ["replace_file", "_write_base_name", "unlink"])
def test_who_is_killed_leaves_a_trace_and_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: object, moment: str
) -> None:
    candidate, _ = pair(tmp_path)
    before, expected = contents(candidate), Trace(candidate).shards[tensor_id()][0].tensor().clone()
    if change is restore:
        archive(candidate, "reference")

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path if moment == "unlink" else archiving, moment, kill)
        with pytest.raises(KeyboardInterrupt):
            archive(candidate, "reference") if change is archive else restore(candidate)
    assert same_bits(Trace(candidate).shards[tensor_id()][0].tensor(), expected)
    archive(candidate, "reference")
    assert not list(candidate.rglob("*.safetensors"))
    assert same_bits(Trace(candidate).shards[tensor_id()][0].tensor(), expected)
    restore(candidate)
    assert contents(candidate) == before


def test_a_trace_that_is_made_again_is_no_archive(tmp_path: Path) -> None:
    candidate, data = pair(tmp_path)
    archive(candidate, "reference")
    write_trace(candidate, {"layer": data})
    assert {path.name for path in (candidate / "rank-00000").iterdir()} == {
        "manifest.json",
        "records.jsonl",
        "chunk-0000.safetensors",
        "end.json",
    }
    assert torch.equal(Trace(candidate).shards[tensor_id()][0].tensor(), data)


def test_an_incomplete_trace_is_refused(tmp_path: Path) -> None:
    candidate, _ = pair(tmp_path)
    (candidate / "rank-00000" / "end.json").unlink()
    with pytest.raises(TraceError, match=r"only complete traces are archived.*without closing it"):
        archive(candidate, "reference")


def test_an_archive_is_read_from_a_store_too(tmp_path: Path) -> None:
    candidate, _ = pair(tmp_path)
    expected = Trace(candidate).shards[tensor_id()][0].tensor().clone()
    archive(candidate, "reference")
    MemoryFileSystem.store.clear()
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/bucket/run/", recursive=True)
    found = Trace(Remote("memory://bucket/run/candidate"))
    assert same_bits(found.shards[tensor_id()][0].tensor(), expected)
    MemoryFileSystem.store.clear()
