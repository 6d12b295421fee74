"""The format: what is written is what is read, what is damaged is refused, and its page is enough for a reader."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ttrace
from tests.support.rank_traces import manifest, normal, record_of, same_bits, tensor_id
from tests.support.record_strategies import FLAT, GOOD, HOSTILE, anything, records
from ttrace.errors import TraceError
from ttrace.layouts.placement import LayoutSource
from ttrace.layouts.region import Region
from ttrace.trace.format import DTYPES, End, ModuleInfo, Record, check_region, parse_end, parse_manifest, seal_model
from ttrace.trace.lines import _Line, decode, decode_quickly, encode
from ttrace.trace.seal import seal_document
from ttrace.trace.writer import Writer


@given(record=records())
@settings(max_examples=400, deadline=None)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    line = encode(record)
    assert "\n" not in line
    assert line.isascii()
    assert decode(line) == record


@given(record=records(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_cut_or_scribbled_line_is_refused_or_read_but_never_crashes(record: Record, data: st.DataObject) -> None:
    line = encode(record)
    at = data.draw(st.integers(0, len(line) - 1))
    for damaged in (line[:at], line[:at] + data.draw(st.characters()) + line[at + 1 :]):
        with suppress(TraceError):
            decode(damaged)


@given(record=records(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_field_of_any_other_content_is_refused_or_read_but_never_crashes(record: Record, data: st.DataObject) -> None:
    entry = json.loads(encode(record))
    entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(anything)
    with suppress(TraceError):
        decode(json.dumps(entry))


def test_the_good_line_is_good() -> None:
    """What the hostile lines change one thing of."""
    assert decode(json.dumps(GOOD)).shape == (4, 6)
    assert decode(json.dumps({**GOOD, "region": FLAT, "shape": [24]})).shape == (24,)


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_line_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TraceError):
        decode(json.dumps({**GOOD, **change}))


@pytest.mark.parametrize("key", ["id", "shape", "dtype", "region", "order", "mb", "at", "crc"])
def test_a_line_without_a_required_field_is_refused(key: str) -> None:
    with pytest.raises(TraceError, match="unreadable record"):
        decode(json.dumps({name: value for name, value in GOOD.items() if name != key}))


@pytest.mark.parametrize("line", ["", "{", "null", "[]", "7", '"text"', "\0" * 64, "[" * 100_000, '{"id":' * 50_000])
def test_a_line_that_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(TraceError, match="unreadable record"):
        decode(line)


def test_the_message_names_the_tensor_and_what_does_not_fit() -> None:
    with pytest.raises(TraceError, match=r"^0/0/layer/output: bytes 1000 to 1096 do not fit shape \(4, 7\)\.$"):
        decode(json.dumps({**GOOD, "shape": [4, 7], "region": None}))


@pytest.mark.parametrize("number", [1 << 63, 10**400])
def test_a_parameter_of_a_distribution_has_at_most_64_bits(number: int) -> None:
    line = {**GOOD, "at": [0, 0, 0], "values": {"kind": "Integers", "low": 0, "high": number}}
    with pytest.raises(TraceError, match=r"high is [0-9]+, but must be finite and fit into 64 bits"):
        decode(json.dumps(line))


def test_generated_values_have_no_sketch() -> None:
    values = {"kind": "Normal", "mean": 0.0, "std": 1.0}
    line = {**GOOD, "at": [0, 0, 0], "values": values, "sketch": [64, 0.5]}
    for decoded in (decode, decode_quickly):
        with pytest.raises(TraceError, match="its values are generated, so it has no sketch"):
            decoded(json.dumps(line, separators=(",", ":")))


def test_bytes_that_end_before_they_begin_are_refused() -> None:
    """Stats keep as many indices as there are bytes, so their length alone says nothing."""
    line = {**GOOD, "at": [0, 944, 8], "stats": [24, 1.0, 1.0, 0.0, 0.0, 0, 0, 0, 0]}
    for decoded in (decode, decode_quickly):
        with pytest.raises(TraceError, match=r"its bytes begin at 944, after their end at 8\.$"):
            decoded(json.dumps(line, separators=(",", ":")))


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40, 0], [0, 1 << 62, 2], [1 << 32, 1 << 32]])
@pytest.mark.parametrize("of_region", [False, True], ids=["tensor", "logical tensor"])
def test_a_shape_whose_strides_cannot_be_counted_is_refused(shape: list[int], of_region: bool) -> None:
    """Torch cannot even make it empty."""
    region = {"shape": shape, "dims": [[]] * len(shape)}
    changed = {"region": region} if of_region else {"shape": shape, "region": None, "at": [0, 0, 0]}
    line = {**GOOD, **changed, "stats": [0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0]}
    for decoded in (decode, decode_quickly):
        with pytest.raises(TraceError, match="no tensor can have this shape"):
            decoded(json.dumps(line, separators=(",", ":")))


def test_the_largest_shape_is_read() -> None:
    line = {**GOOD, "shape": [1 << 31, (1 << 31) - 1, 2, 0], "region": None, "at": [0, 0, 0]}
    assert decode(json.dumps(line)).shape[-1] == 0


def test_a_record_whose_region_has_another_shape_is_refused_before_it_is_written() -> None:
    record = replace(record_of("layer", torch.zeros(3)), region=Region.whole((4,)))
    with pytest.raises(TraceError, match=r"its region whole has shape \(4,\), its data \(3,\)"):
        check_region(record)


def test_a_manifest_is_read_as_it_was_written() -> None:
    full = manifest(3, 8, mesh="dp=2 tp=4").model_copy(
        update={
            "modules": {"größe": ModuleInfo(type="Linear", source="model.py:3")},
            "parameters": {"größe.weight": True},
            "aliases": {"lm_head.weight": "embed.weight"},
            "notes": ("dropout off",),
            "versions": {"torch": "2.13"},
        }
    )
    assert parse_manifest(seal_model(full), "manifest.json") == full


@pytest.mark.parametrize("seal", [seal_document, str], ids=["sealed", "as the first format was"])
@pytest.mark.parametrize("version", [0, 1, 99, "2", None, [2]])
def test_a_manifest_of_another_format_is_refused_by_name(version: object, seal: Callable[[str], str]) -> None:
    text = seal(json.dumps({**json.loads(manifest().model_dump_json()), "format": version}))
    with pytest.raises(
        TraceError, match=r"here/manifest\.json: format .*, but this TTrace reads format 4\. Trace again\.$"
    ):
        parse_manifest(text, "here/manifest.json")


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"},
        {"rank": -1},
        {"num_ranks": 0},
        {"num_microbatches": 0},
        {"mesh": 4},
        {"modules": []},
        {"parameters": {"weight": "yes"}},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_damaged_manifest_is_refused(change: dict[str, Any]) -> None:
    text = seal_document(json.dumps({**json.loads(manifest().model_dump_json()), **change}))
    with pytest.raises(TraceError, match=r"here/manifest\.json is damaged"):
        parse_manifest(text, "here/manifest.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "{}", "[" * 100_000])
def test_text_that_is_no_manifest_and_no_end_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match="manifest"):
        parse_manifest(text, "manifest.json")
    with pytest.raises(TraceError, match="end"):
        parse_end(text, "end.json")


def test_an_end_is_read_as_it_was_written() -> None:
    end = End(num_records=7, num_steps=1, problems=("0/0/layer/output could not be recorded",))
    assert parse_end(seal_model(end), "end.json") == end


def test_an_end_whose_parameters_have_settings_that_are_not_there_is_refused() -> None:
    end = End(num_steps=1, settings=({"lr": "0.1"},), settings_of={"weight": 0})
    assert parse_end(seal_model(end), "end.json") == end
    with pytest.raises(TraceError, match=r"end\.json is damaged: .*settings that are not there"):
        parse_end(seal_document(end.model_dump_json().replace('"weight":0', '"weight":1')), "end.json")


def test_nothing_is_ever_unpickled() -> None:
    """No source file of ours knows how, but for that by which a test hands its own function to ranks it starts.

    Users' checkpoints are read by torch's own readers, without running code where torch can do so.
    """
    root = Path(ttrace.__file__).parent
    checkpoints = root / "checkpoints" / "checkpoint.py"
    assert all("weights_only=True" in line for line in _code(checkpoints) if "torch.load(" in line)
    sources = sorted(set(root.rglob("*.py")) - {root / "testing" / "call.py", checkpoints})
    assert len(sources) > 10
    forbidden = re.compile(r"\b(pickle|cPickle|dill|marshal|shelve|joblib)\b|torch\.load\b|\beval\(|\bexec\(")
    found = [f"{path.relative_to(root)}: {line}" for path in sources for line in _code(path) if forbidden.search(line)]
    assert found == []


def _code(path: Path) -> Iterator[str]:
    return (line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


# A reader written from docs/reference/trace-format.md alone: it imports nothing of ours.

PAGE_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


def page_document(path: Path) -> dict[str, Any]:
    """A document whose checksum fits."""
    text = path.read_text(encoding="utf-8")
    body, seal = text[:-22], text[-22:]
    assert seal == f',\n "sum": "{zlib.crc32(body.encode()):08x}"\n}}'
    document: dict[str, Any] = json.loads(text)
    return document


def page_crc(data: bytes) -> str:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = 0x82F63B78 ^ crc >> 1 if crc & 1 else crc >> 1
    return f"{crc ^ 0xFFFFFFFF:08x}"


def page_records(rank: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Each record of a rank with its data."""
    assert page_document(rank / "manifest.json")["format"] == 4
    text = (rank / "records.jsonl").read_text(encoding="utf-8")
    assert page_document(rank / "end.json")["records_sum"] == f"{zlib.crc32(text.encode()):08x}"
    for line in text.split("\n")[:-1]:
        assert line[-18:] == f',"sum":"{zlib.crc32(line[:-18].encode()):08x}"}}'
        entry = json.loads(line)
        chunk, begin, end = entry["at"]
        data = (rank / f"chunk-{chunk:04d}.safetensors").read_bytes()[begin:end]
        assert page_crc(data) == entry["crc"]
        assert begin % 8 == 0
        dtype = PAGE_DTYPES[entry["dtype"]]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        yield entry, flat.view(entry["shape"])


def page_join(region: dict[str, Any], local: torch.Tensor, full: torch.Tensor) -> None:
    """Put a shard where it belongs, element by element."""
    whole = [[[0, size]] if size else [] for size in region["shape"]]
    index = [[i for start, stop in dim for i in range(start, stop)] for dim in region.get("dims", whole)]
    grid = torch.arange(full.numel()).view(region["shape"])
    for dim, picked in enumerate(index):
        grid = grid.index_select(dim, torch.tensor(picked, dtype=torch.int64))
    places = grid.reshape(-1)
    if "flat" in region:
        places = torch.cat([places[start:stop] for start, stop in region["flat"]])
    full.view(-1)[places] = local.reshape(-1)


def page_header(chunk: Path) -> dict[str, Any]:
    data = chunk.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length == 262_136
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def test_the_page_is_enough_to_write_a_reader(tmp_path: Path) -> None:
    shards = {
        "rows": [Region((8, 6), (((6, 8), (0, 2)), ((0, 6),))), Region((8, 6), (((2, 6),), ((0, 6),)))],
        "columns": [Region((3, 7), (((0, 3),), ((0, 4),))), Region((3, 7), (((0, 3),), ((4, 7),)))],
        "flat": [Region.flat_of((5, 5), ((0, 9), (20, 25))), Region.flat_of((5, 5), ((9, 20),))],
        "flat of a box": [
            Region((4, 4), (((0, 4),), ((2, 4), (0, 1))), ((3, 12), (0, 3))),
            Region((4, 4), (((0, 4),), ((1, 2),))),
        ],
    }
    for rank in (0, 1):
        writer = Writer(tmp_path, manifest(rank, 2, mesh="tp=2"))
        for name, parts in shards.items():
            name = name.replace(" ", "_")
            tensor = normal(name, parts[rank], torch.bfloat16)
            writer.write(record_of(name, tensor, parts[rank]), tensor)
        writer.close(End(num_steps=1))

    joined: dict[str, torch.Tensor] = {}
    for rank_folder in sorted(tmp_path.glob("rank-*")):
        assert page_document(rank_folder / "end.json")["num_records"] == len(shards)
        header = page_header(rank_folder / "chunk-0000.safetensors")
        for number, (entry, tensor) in enumerate(page_records(rank_folder)):
            assert entry["order"] == number
            assert [262_144 + at for at in header[entry["id"]]["data_offsets"]] == entry["at"][1:]
            empty = torch.full(entry["region"]["shape"], math.nan, dtype=tensor.dtype)
            page_join(entry["region"], tensor, joined.setdefault(entry["id"], empty))
    assert len(joined) == len(shards)
    for name, parts in shards.items():
        name = name.replace(" ", "_")
        whole = normal(name, Region.whole(parts[0].shape), torch.bfloat16)
        assert same_bits(joined[str(tensor_id(name))], whole)


def test_the_page_names_every_field_and_dtype() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md").read_text()
    fields = [
        *_Line.model_fields,
        "sum",
        *(source.value for source in LayoutSource),
        *type(manifest()).model_fields,
        *End.model_fields,
    ]
    assert [name for name in fields if f"`{name}`" not in page and f'"{name}"' not in page] == []
    assert [name for name in DTYPES if name not in page] == []
    assert set(DTYPES.items()) == set(PAGE_DTYPES.items())
