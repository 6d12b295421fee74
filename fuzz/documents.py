"""Lines and documents of a trace. Each input is read as it is, and sealed: a hostile writer knows checksums too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from fuzz.mutation import mutate_json_text
from fuzz.records import mutate_record
from fuzz.target import Target
from ttrace.errors import TTraceError
from ttrace.layouts.ids import Phase, TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.region import Region
from ttrace.layouts.splits import Split
from ttrace.trace.agreement import check_end, check_ranks
from ttrace.trace.collectives import Collective, Group, decode_collectives, encode_collective
from ttrace.trace.format import (
    Attachment,
    End,
    Manifest,
    ModuleInfo,
    Operation,
    Record,
    SketchInfo,
    parse_end,
    parse_manifest,
)
from ttrace.trace.lines import decode, decode_quickly, encode
from ttrace.trace.seal import seal_document, seal_line, strip_seal, sum_of
from ttrace.values.generate import Integers, Normal
from ttrace.values.stats import Stats

Result = TypeVar("Result")


def _run_line(data: bytes) -> None:
    line = data.decode("utf-8", "surrogateescape")
    quick, slow = _find_outcome(decode_quickly, line), _find_outcome(decode, line)
    if repr(quick) != repr(slow):
        raise AssertionError(f"decode_quickly gives {quick}, decode {slow}")
    if isinstance(slow, Record) and repr(decode(encode(slow))) != repr(slow):
        raise AssertionError(f"{slow} is another record when it is written and read")
    sealed = f"{_seal_line(line)}\n".encode("utf-8", "surrogateescape")
    for ledger, whole_sum in ((data, None), (data, sum_of(data)), (sealed, None), (sealed, sum_of(sealed))):
        for one in _try(decode_collectives, ledger, "ledger", whole_sum) or ():
            _ = str(one), one.what


def _seal_line(line: str) -> str:
    try:
        return seal_line(line)
    except UnicodeEncodeError:
        return line


def _find_outcome(read: Callable[[str], Record], line: str) -> Record | str:
    """Find what a reader makes of a line: a record, or a refusal."""
    try:
        return read(strip_seal(_seal_line(line)))
    except TTraceError:
        return "refused"


def _run_manifest(data: bytes) -> None:
    for text in _list_forms(data):
        manifest = _try(parse_manifest, text, "manifest.json")
        if manifest is not None:
            _try(check_ranks, "trace", [(manifest, None)])
            if parse_manifest(seal_document(manifest.model_dump_json(indent=1)), "again") != manifest:
                raise AssertionError("a manifest is another one when it is written and read")


def _run_end(data: bytes) -> None:
    for text in _list_forms(data):
        end = _try(parse_end, text, "end.json")
        if end is not None:
            _try(check_end, "end.json", end)
            for split in end.splits.values():
                _try(_cut, split)


def _list_forms(data: bytes) -> list[str]:
    """List the texts that an input stands for: itself, and itself with a seal."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        return [text, seal_document(text)]
    except (AssertionError, UnicodeEncodeError):  # nothing that can be sealed
        return [text]


def _cut(split: str) -> None:
    Split.parse(split).ranges(24, 1, 2)


def _try(action: Callable[..., Result], *arguments: Any) -> Result | None:
    """Do something that may be refused, and go on."""
    try:
        return action(*arguments)
    except TTraceError:
        return None


def _make_lines() -> Iterable[bytes]:
    """Make a line of each kind of record, and one of a ledger."""
    rule = Provenance(LayoutSource.RULE, 'rule "*.fc1/output"')
    tensor_id = TensorId.parse("0/1/layers.0.fc1@1/output.0")
    box = Region((8, 6), (((6, 8), (0, 2)), ((0, 6),)))
    records = (
        Record(tensor_id, (4, 6), torch.bfloat16, box, ("tp",), "a/cp:zigzag b", rule, 3, 1, begin=64, end=112, crc=7),
        Record(tensor_id, (10,), torch.float32, Region.flat_of((8, 6), ((10, 20),)), begin=8, end=48),
        Record(tensor_id, (), torch.int64, None, end=8),
        Record(tensor_id, (8, 6), torch.float32, Region.whole((8, 6)), values=Normal(0.0, 0.5)),
        Record(tensor_id, (8,), torch.int64, Region.whole((8,)), values=Integers(0, 9, 0.5, -100), end=64),
        Record(tensor_id, (4, 6), torch.float32, box, sketch=SketchInfo(4, 0.25), end=32),
        Record(tensor_id, (4, 6), torch.float32, box, stats=Stats(24, 1.0, 1.0, 0.5, 0.75), end=16),
    )
    yield from (encode(record).encode() for record in records)
    yield encode_collective(COLLECTIVE).encode()


COLLECTIVE = Collective(
    order=0,
    step=0,
    microbatch=0,
    module="layers.0",
    phase=Phase.BACKWARD,
    op="all_reduce",
    reduction="sum",
    group=Group(axes=("tp",)),
    peer=1,
    shape=(4, 6),
    dtype="BF16",
    num_tensors=1,
    num_bytes=48,
    is_async=True,
    source="train.py:7",
    begin=1,
)
MANIFEST = Manifest(
    role="candidate",
    rank=0,
    num_ranks=2,
    mesh="tp=2",
    seed=7,
    launch="0" * 32,
    modules={".": ModuleInfo(type="train.Model", source="train.py:3"), "layers.0": ModuleInfo(type="torch.nn.Linear")},
    parameters={"layers.0.weight": True},
    aliases={"head.weight": "layers.0.weight"},
    padding={"layers.0.weight": 2},
    opaque=("compiled",),
    passed=("layers.1",),
    reduced=("dp",),
    notes=("dropout was set to 0",),
    attachment=Attachment(model="Model", optimizers=("SGD",), data="the loader", num_microbatches=1, labels=True),
    versions={"torch": "2.13.0"},
    environment={"NCCL_ALGO": "Ring"},
)
END_OF_RANK = End(
    num_records=3,
    num_steps=1,
    launch="0" * 32,
    random=("dropout",),
    splits={"cp": "zigzag", "tp": "fused(2)"},
    batch_axes=("dp",),
    settings=({"lr": "0.1"},),
    settings_of={"layers.0.weight": 0},
    samples={"0/0": ("aa", "bb")},
    replaced={"0/0": ("aa", "bb")},
    flags={"device": "cpu"},
    notes=("a note",),
    operations={"layers.0": (Operation(slot="add.0", source="train.py:7", takes=("input",), collectives=(0,)),)},
    sources={str(Path("train.py")): "00"},
)

TARGETS = (
    Target("lines", _run_line, mutate_record, make_seeds=_make_lines, usual_bytes=1000),
    Target(
        "manifest",
        _run_manifest,
        mutate_json_text,
        make_seeds=lambda: (MANIFEST.model_dump_json(indent=1).encode(),),
        usual_bytes=4000,
    ),
    Target(
        "end",
        _run_end,
        mutate_json_text,
        make_seeds=lambda: (END_OF_RANK.model_dump_json(indent=1).encode(),),
        usual_bytes=4000,
    ),
)
