"""The writer: closed chunks are ordinary safetensors files, and nothing that goes wrong costs more than itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.rank_traces import manifest, record_of, same_bits, tensor_id, write_trace
from ttrace.errors import TraceError
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import DTYPES, End, Record
from ttrace.trace.rank import RankTrace
from ttrace.trace.reader import Trace
from ttrace.trace.seal import open_document, sum_of
from ttrace.trace.writer import HEADER_BYTES, Writer
from ttrace.values.generate import Normal, generate_values
from zoo.harness.limits import HANG


def contents(chunk: Path) -> dict[str, torch.Tensor]:
    """What safetensors' own reader finds, padding left out."""
    with safe_open(chunk, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if "/" in name}  # noqa: SIM118  # no mapping


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern there is, nan among them; booleans stay booleans."""
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return data.view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_a_closed_chunk_is_a_safetensors_file_with_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Odd sizes in between, so that every tensor needs padding."""
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (5, 7), (3, 0, 2), (1, 1, 1), (7,), (33, 3)]
    tensors = {f"layers.{i}": any_bits(shape, dtype) for i, shape in enumerate(shapes)}
    folder = write_trace(tmp_path, tensors)
    found = contents(folder / "chunk-0000.safetensors")
    assert list(found) == [str(tensor_id(name)) for name in sorted(tensors)]
    trace = RankTrace(folder)
    for record in trace.records:
        assert record.begin % 8 == 0
        assert same_bits(found[str(record.id)], tensors[record.id.name])
        assert same_bits(trace.read_stored(record), tensors[record.id.name])


def test_all_dtypes_lie_side_by_side_in_one_chunk(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {f"a.{name}": any_bits((3, 5), dtype) for name, dtype in DTYPES.items()}
    found = contents(write_trace(tmp_path, tensors) / "chunk-0000.safetensors")
    assert all(same_bits(found[str(tensor_id(name))], tensor) for name, tensor in tensors.items())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[1::2, ::3],
    "expanded": lambda x: x[:1].expand(4, -1),
    "an offset": lambda x: x[2],
    "negated in place": lambda x: torch._neg_view(x),  # what .imag of a conjugate is
    "with a gradient": lambda x: x.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_view_is_written_as_what_it_shows(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    shown = view(torch.randn(6, 8).to(dtype))
    trace = RankTrace(write_trace(tmp_path, {"layer": shown}))
    assert torch.equal(trace.read_stored(trace.records[0]), shown.detach())


def test_chunks_roll_over_by_size(tmp_path: Path) -> None:
    tensors = {f"layers.{i}": torch.full((250,), float(i)) for i in range(10)}
    folder = write_trace(tmp_path, tensors, chunk_bytes=3000)
    chunks = sorted(folder.glob("chunk-*"))
    assert [len(contents(chunk)) for chunk in chunks] == [3, 3, 3, 1]
    trace = RankTrace(folder)
    assert [record.chunk for record in trace.records] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert all(torch.equal(trace.read_stored(record), tensors[record.id.name]) for record in trace.records)


def test_a_tensor_larger_than_a_chunk_gets_one_for_itself(tmp_path: Path) -> None:
    tensors = {"small": torch.ones(5), "large": torch.randn(5000), "last": torch.ones(5)}
    folder = write_trace(tmp_path, tensors, chunk_bytes=1000)
    assert [record.chunk for record in RankTrace(folder).records] == [0, 1, 2]
    assert torch.equal(contents(folder / "chunk-0001.safetensors")["0/0/large/output"], tensors["large"])


@pytest.mark.parametrize("letter", ["a", "ö", "\N{CIRCLED DIGIT ONE}", '"'], ids=["ascii", "latin", "wide", "quote"])
def test_chunks_roll_over_before_the_header_is_full(tmp_path: Path, letter: str) -> None:
    """Names are counted as JSON spells them: one letter may take six bytes."""
    tensors = {f"{letter * 100}.{i}": torch.tensor([i % 256], dtype=torch.uint8) for i in range(3000)}
    folder = write_trace(tmp_path, tensors)
    chunks = sorted(folder.glob("chunk-*"))
    assert len(chunks) > 1
    found = {name: tensor for chunk in chunks for name, tensor in contents(chunk).items()}
    assert all(int(found[str(tensor_id(name))]) == int(tensor) for name, tensor in tensors.items())
    # The room is used, not just kept.
    header = chunks[0].read_bytes()[8:HEADER_BYTES].rstrip()
    assert len(header) > 0.9 * HEADER_BYTES


def test_a_name_that_fits_no_header_is_refused_and_the_rest_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path, manifest())
    one = torch.ones(1)
    with pytest.raises(TraceError, match="a name of 300011 characters does not fit"):
        writer.write(record_of("x" * 300_000, one), one)
    writer.write(record_of("x" * 100_000, one), one)
    writer.write(record_of("y" * 200_000, one), one)
    writer.close(End(num_steps=1))
    assert len(RankTrace(writer.folder).records) == 2
    assert sum(len(contents(chunk)) for chunk in writer.folder.glob("chunk-*")) == 2


def test_an_id_that_repeats_is_kept_under_another_name(tmp_path: Path) -> None:
    """Several microbatches of one logical tensor share its id, also with a name that looks like the other one's."""
    writer = Writer(tmp_path, manifest())
    ids = [tensor_id(), tensor_id(), TensorId.of(0, 0, "layer", Kind.OUTPUT, slot="#1"), tensor_id()]
    for i, repeated in enumerate(ids):
        data = torch.tensor([float(i), 0.0])
        writer.write(Record(repeated, (2,), data.dtype, Region.whole((2,)), microbatch=i), data)
    writer.close(End(num_steps=1))
    found = contents(writer.folder / "chunk-0000.safetensors")
    assert sorted(float(tensor[0]) for tensor in found.values()) == [0.0, 1.0, 2.0, 3.0]
    trace = RankTrace(writer.folder)
    assert [float(trace.read_stored(record)[0]) for record in trace.records] == [0.0, 1.0, 2.0, 3.0]
    assert [record.microbatch for record in trace.records] == [0, 1, 2, 3]


def test_a_dtype_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    writer = Writer(tmp_path, manifest())
    with pytest.raises(TraceError, match=r"0/0/layer/output: a trace holds no torch\.complex64"):
        writer.write(record_of("layer", torch.zeros(2, dtype=torch.complex64)), torch.zeros(2, dtype=torch.complex64))
    writer.close(End(num_steps=1))
    assert RankTrace(writer.folder).records == ()


def test_records_number_themselves_and_the_end_counts_them(tmp_path: Path) -> None:
    folder = write_trace(tmp_path, {name: torch.ones(3) for name in "abc"})
    assert [record.order for record in RankTrace(folder).records] == [0, 1, 2]
    assert json.loads(open_document((folder / "end.json").read_text(), "end.json")) == {
        "num_records": 3,
        "records_sum": sum_of((folder / "records.jsonl").read_bytes()),
        "collectives_sum": "",
        "operations": {},
        "unloaded": [],
        "initial": {},
        "stale": None,
        "num_steps": 1,
        "launch": "",
        "grad_factor": 1.0,
        "splits": {},
        "settings": [],
        "batch_axes": [],
        "settings_of": {},
        "evaluated": [],
        "random": [],
        "forward_buffers": [],
        "samples": {},
        "replaced": {},
        "num_samples": 0,
        "flags": {},
        "problems": [],
        "notes": [],
        "sources": {},
    }


def test_a_trace_of_nothing_is_complete(tmp_path: Path) -> None:
    write_trace(tmp_path, {})
    trace = Trace(tmp_path)
    assert list(trace.problems()) == []
    assert trace.shards == {}


def test_tracing_again_into_a_folder_leaves_nothing_of_the_earlier_trace(tmp_path: Path) -> None:
    """Least of all its end: the new run has not finished."""
    old = write_trace(tmp_path, {f"old.{i}": torch.ones(300) for i in range(5)}, chunk_bytes=1000)
    assert len(list(old.glob("chunk-*"))) == 5
    writer = Writer(tmp_path, manifest())
    assert [*Trace(tmp_path).problems()] != []
    assert Trace(tmp_path).shards == {}
    writer.write(record_of("new", torch.ones(2)), torch.ones(2))
    writer.close(End(num_steps=1))
    assert sorted(path.name for path in old.iterdir()) == [
        "chunk-0000.safetensors",
        "end.json",
        "manifest.json",
        "records.jsonl",
    ]
    assert [str(found) for found in Trace(tmp_path).shards] == ["0/0/new/output"]


def places(folder: Path) -> list[tuple[int, int]]:
    return [(record.chunk, record.begin) for record in RankTrace(folder).records]


def test_equal_bytes_are_written_once(tmp_path: Path) -> None:
    """Whatever they are called, and wherever in memory they lie."""
    data = torch.randn(100, 100)
    tensors = {"out": data, "other": torch.randn(100, 100), "in": data, "copy": data.clone(), "flat": data.view(-1)}
    folder = write_trace(tmp_path, tensors)
    first, second, *rest = places(folder)
    assert first != second
    assert rest == [first] * 3
    assert (folder / "chunk-0000.safetensors").stat().st_size == HEADER_BYTES + 2 * data.nbytes
    assert list(contents(folder / "chunk-0000.safetensors")) == ["0/0/other/output", "0/0/out/output"]
    trace = RankTrace(folder)
    assert all(same_bits(trace.read_stored(record), tensors[record.id.name]) for record in trace.records)


def test_bytes_that_changed_without_a_new_version_are_written_anew(tmp_path: Path) -> None:
    """As by a collective, which changes a tensor in place and counts nothing."""
    data = torch.zeros(100, 100)
    writer = Writer(tmp_path, manifest())
    for i in (0, 5000, 9999):
        data.data.view(-1)[i] = 1.0
        assert data._version == 0
        writer.write(record_of(f"after.{i}", data), data)
    writer.close(End(num_steps=1))
    trace = RankTrace(writer.folder)
    assert [int(trace.read_stored(record).sum()) for record in trace.records] == [1, 2, 3]


def test_zeros_of_both_signs_and_nans_of_other_bits_are_not_equal(tmp_path: Path) -> None:
    zeros = torch.zeros(3000)
    other = zeros.clone()
    other[1500] = -0.0
    nans = torch.full((3000,), torch.nan)
    trace = RankTrace(write_trace(tmp_path, {"a": zeros, "b": other, "c": nans, "d": nans.clone()}))
    assert [record.begin == trace.records[0].begin for record in trace.records] == [True, False, False, False]
    assert trace.records[2].begin == trace.records[3].begin
    assert same_bits(trace.read_stored(trace.records[1]), other)


def test_equal_bytes_in_an_earlier_chunk_are_written_again(tmp_path: Path) -> None:
    """A chunk can be read without the others."""
    data = torch.randn(2000)
    folder = write_trace(tmp_path, {"a": data, "b": torch.randn(2000), "c": data}, chunk_bytes=16_000)
    assert [chunk for chunk, _ in places(folder)] == [0, 0, 1]


def test_equal_bytes_that_have_left_the_arena_are_written_again(tmp_path: Path) -> None:
    data = torch.randn(5000)
    tensors = {"a": data, "b": data.clone(), **{f"c.{i}": torch.randn(5000) for i in range(5)}, "d": data.clone()}
    folder = write_trace(tmp_path, tensors, max_bytes_held=1 << 17)
    first, second, *_, last = places(folder)
    assert first == second != last
    trace = RankTrace(folder)
    assert all(same_bits(trace.read_stored(record), tensors[record.id.name]) for record in trace.records)


def test_no_more_is_held_back_than_the_arena(tmp_path: Path) -> None:
    """What a killed writer loses."""
    writer = Writer(tmp_path, manifest(), max_bytes_held=1 << 20)
    tensors = [torch.randn(50_000) for _ in range(30)]
    for i, tensor in enumerate(tensors):
        writer.write(record_of(f"layers.{i}", tensor), tensor)
        trace = RankTrace(writer.folder)
        missing = tensors[len(trace.records) : i + 1]
        assert sum(late.nbytes for late in missing) <= (1 << 19) + tensor.nbytes
        if trace.records:
            assert same_bits(trace.read_stored(trace.records[-1]), tensors[len(trace.records) - 1])
    writer.close(End(num_steps=1))


def test_a_tensor_that_cannot_be_copied_costs_nothing_else(tmp_path: Path) -> None:
    """Half of it may be in the file: safetensors still finds no hole."""
    writer = Writer(tmp_path, manifest(), max_bytes_held=1 << 20)
    good = torch.randn(333)
    bad = torch.randn(3000, 1001).T
    for name, tensor in (("first", good), ("bad", bad), ("last", -good)):
        try:
            with FailsLate() if name == "bad" else nullcontext():  # type: ignore[no-untyped-call]  # of torch
                writer.write(record_of(name, tensor), tensor)
        except MemoryError:
            assert name == "bad"
    writer.close(End(num_steps=1))
    found = contents(writer.folder / "chunk-0000.safetensors")
    assert set(found) == {"0/0/first/output", "0/0/last/output"}
    assert same_bits(found["0/0/last/output"], -good)
    trace = RankTrace(writer.folder)
    assert [record.order for record in trace.records] == [0, 1]
    assert same_bits(trace.read_stored(trace.records[1]), -good)


class FailsLate(TorchDispatchMode):
    """The fifth copy finds no memory."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func is torch.ops.aten.copy_.default
        if self.num_copies == 5:
            raise MemoryError
        return func(*args, **(kwargs or {}))


NEVER_CLOSED = """
import os, sys, torch
from pathlib import Path
from tests.support.rank_traces import manifest, record_of
from ttrace.trace.writer import Writer

writer = Writer(Path(sys.argv[1]), manifest(), max_bytes_held=1 << 18)
for i in range(30):
    tensor = torch.full((5000,), float(i))
    writer.write(record_of(f"layers.{i}", tensor), tensor)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    raise RuntimeError("out of luck")
"""


def test_a_script_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    """Nor does a fork of it, which ends first, disturb or wait for anything."""
    command = [sys.executable, "-W", "ignore", "-c", NEVER_CLOSED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=Path(__file__).parents[2])
    assert ended.returncode == 1
    assert ended.stderr.endswith("RuntimeError: out of luck\n")
    trace = Trace(tmp_path)
    assert [*trace.problems()] == [
        f"{tmp_path}/rank-00000 is incomplete: 30 records, then the run ended without closing it"
    ]
    for i, record in enumerate(trace.ranks[0].records):
        assert same_bits(trace.ranks[0].read_stored(record), torch.full((5000,), float(i)))


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that were made and are still there."""

    now = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self._add(made.nbytes)
            weakref.finalize(made, self._add, -made.nbytes)
        return made

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("shape", [(1, 1000, 2000), (3, 1, 7, 90_001), (5, 400_000)], ids=str)
def test_a_tensor_out_of_order_is_copied_in_parts_within_the_limit(tmp_path: Path, shape: tuple[int, ...]) -> None:
    limit = 1 << 20
    shown = torch.randn(shape, dtype=torch.float64).transpose(-1, -2)
    assert shown.nbytes > 10 * limit
    writer = Writer(tmp_path, manifest(), max_bytes_held=limit)
    with Held() as held:  # type: ignore[no-untyped-call]  # of torch
        for name in ("first", "second"):
            writer.write(record_of(name, shown), shown)
    writer.close(End(num_steps=1))
    assert 0 < held.peak <= limit
    assert held.now == 0
    trace = RankTrace(writer.folder)
    assert all(torch.equal(trace.read_stored(record), shown) for record in trace.records)


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from tests.support.rank_traces import manifest, record_of
from ttrace.trace.format import End
from ttrace.trace.writer import HEADER_BYTES, Writer

flushes = sys.argv[2] == "flushes"
writer = Writer(Path(sys.argv[1]), manifest(), max_bytes_held=1 << 16)
for i in range(40):
    tensor = torch.full((1000 if i % 4 else 9000,), float(i))
    # Now and then writes fail, as on a full disk: all of them, or beyond what is there by now, half way.
    there = next(writer.folder.glob("chunk-*")).stat().st_size if i else HEADER_BYTES
    limit = {3: 0, 4: 100, 12: there + 5000, 18: there, 20: there + 10_000}.get(i % 21, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    writer.write(record_of(f"layers.{i}", tensor), tensor)
    if flushes:
        writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.close(End(num_steps=1))
"""


@pytest.mark.parametrize("when", ["flushes", "buffers"])
def test_a_failed_write_costs_what_it_should_have_written(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), when]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    trace = Trace(tmp_path)
    problems = list(trace.problems())
    shards = [shard for shards in trace.shards.values() for shard in shards]
    assert len(problems) > 3
    assert all(re.fullmatch(r"0/0/layers\.\d+/output could not be recorded: OSError: .*", text) for text in problems)
    assert len(shards) > 10
    assert len(shards) + len(problems) == 40
    for shard in shards:
        i = int(shard.id.name.split(".")[1])
        assert torch.equal(shard.tensor(), torch.full((1000 if i % 4 else 9000,), float(i)))
    found = contents(Path(str(trace.ranks[0].folder)) / "chunk-0000.safetensors")
    assert {str(shard.id) for shard in shards} == set(found)


def test_a_tensor_without_bytes_is_made_when_it_is_read(tmp_path: Path) -> None:
    """In its place among the others, and any region of it."""
    other, made = tensor_id("first"), tensor_id("made")
    region = Region((6, 4), (((4, 6), (0, 1)), ((0, 4),)))
    record = Record(made, region.local_shape, torch.bfloat16, region, values=Normal(1.0, 0.5))
    writer = Writer(tmp_path, manifest())
    writer.write_generated(record)
    writer.write(record_of("first", torch.ones(2)), torch.ones(2))
    writer.write_generated(replace(record, id=tensor_id("last")))
    writer.close(End(num_steps=1))
    trace = Trace(tmp_path)
    assert list(trace.problems()) == []
    assert [shard.record.order for [shard] in trace.shards.values()] == [0, 1, 2]
    assert list(trace.shards) == [made, other, tensor_id("last")]
    expected = generate_values(
        made, region, dtype=torch.bfloat16, distribution=Normal(1.0, 0.5), seed=trace.manifest.seed
    )
    assert torch.equal(trace.shards[made][0].tensor(), expected)
