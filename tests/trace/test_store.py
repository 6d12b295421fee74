"""Stores: a trace in one is the same trace, and a store that fails now and then changes nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from bench import stores
from tests.support.rank_traces import manifest, record_of, tensor_id
from ttrace.errors import TraceError
from ttrace.trace import store
from ttrace.trace.format import End
from ttrace.trace.reader import Trace
from ttrace.trace.store import Remote, parse_place
from ttrace.trace.writer import Writer


class Flaky(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Every other request fails; requests are noted."""

    protocol = "flaky"
    asked: list[tuple[str, str, int | None, int | None]] = []  # noqa: RUF012  # of all instances
    is_down = False

    def _fail(self, what: str, path: str, start: int | None = None, end: int | None = None) -> None:
        Flaky.asked.append((what, path, start, end))
        if len(Flaky.asked) % 2 or Flaky.is_down:
            raise ConnectionResetError("slow down")

    def info(self, path: str, **options: Any) -> Any:
        self._fail("info", path)
        return super().info(path, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self._fail("cat", path, start, end)
        return super().cat_file(path, start, end, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        self._fail("pipe", path)
        return super().pipe_file(path, value, **options)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(store, "_FIRST_PAUSE", 1e-3)
    MemoryFileSystem.store.clear()
    Flaky.asked.clear()
    Flaky.is_down = False
    store.forget()
    yield Remote("flaky://bucket/run")
    MemoryFileSystem.store.clear()


TENSORS = {f"layers.{i}": torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(6)}


def write(remote: Remote, num_ranks: int = 1, **options: Any) -> list[Writer]:
    writers = []
    for rank in range(num_ranks):
        writers.append(Writer(remote, manifest(rank, num_ranks, mesh=f"tp={num_ranks}"), **options))
        for name, tensor in TENSORS.items():
            writers[-1].write(record_of(name, tensor), tensor)
    return writers


def test_a_trace_in_a_store_is_the_same_trace(remote: Remote) -> None:
    writers = write(remote, 2, chunk_bytes=4500)
    for writer in writers:
        writer.close(End(num_steps=1))
        assert not writer.folder.exists(), "nothing is left on the disk"
    trace = Trace(remote)
    assert list(trace.problems()) == []
    for name, tensor in TENSORS.items():
        assert [torch.equal(shard.tensor(), tensor) for shard in trace.shards[tensor_id(name)]] == [True, True]


def test_only_the_bytes_of_a_tensor_are_read_and_once(remote: Remote) -> None:
    (writer,) = write(remote)
    writer.close(End(num_steps=1))
    (shard,) = Trace(remote).shards[tensor_id("layers.3")]
    Flaky.asked.clear()
    for _ in range(3):
        shard.tensor()
    ranges = {(start, end) for what, _, start, end in Flaky.asked if what == "cat"}
    assert ranges == {(shard.record.begin, shard.record.end)}
    assert len(Flaky.asked) <= 2, "the first try failed"


def test_a_killed_writer_leaves_what_is_in_closed_chunks(remote: Remote) -> None:
    (writer,) = write(remote, chunk_bytes=4500)
    assert writer._upload is not None
    writer._upload.settle()
    trace = Trace(remote)
    assert [str(name) for name in trace.shards] == [f"0/0/layers.{i}/output" for i in range(4)]
    assert all(torch.equal(trace.shards[tensor_id(name)][0].tensor(), TENSORS[name]) for name in list(TENSORS)[:4])
    assert "incomplete: 4 records" in next(iter(trace.problems()))
    writer.close(End(num_steps=1))


def test_an_earlier_trace_under_the_name_ends_when_the_next_begins(remote: Remote) -> None:
    (writer,) = write(remote)
    writer.close(End(num_steps=1))
    (again,) = write(remote)
    assert Trace(remote).ranks[0].end is None
    again.close(End(num_steps=1))


def test_a_store_that_is_down_is_told(remote: Remote) -> None:
    (writer,) = write(remote)
    writer.close(End(num_steps=1))
    (shard,) = Trace(remote).shards[tensor_id("layers.0")]
    Flaky.is_down = True
    with pytest.raises(
        TraceError, match=r"chunk-0000\.safetensors: the store failed 7 times, the last time with .*slow down"
    ):
        shard.tensor()


def test_no_trace_and_no_store_are_told(remote: Remote) -> None:
    with pytest.raises(TraceError, match="holds no trace"):
        Trace(remote / "nothing")
    with pytest.raises(TraceError, match=r"nosuch:// needs fsspec and its store: pip install 'torch-ttrace\[stores\]'"):
        Trace(Remote("nosuch://bucket"))


def test_urls_and_paths_are_told_apart() -> None:
    assert parse_place("s3://bucket/run/") == Remote("s3://bucket/run")
    assert parse_place("file:///tmp/run") == Path("/tmp/run")
    assert parse_place("runs/a") == Path("runs/a")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("moto"), reason="needs moto's S3")
def test_verdicts_from_s3_are_those_from_the_disk(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """19 s on two cores that others use. A share of the requests fails."""
    monkeypatch.setattr(stores, "NUM_TENSORS", 50)
    monkeypatch.setattr(stores, "FAULTS", 0.03)
    assert stores.main() == 0, capfd.readouterr()
