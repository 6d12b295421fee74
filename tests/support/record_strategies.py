"""Records of every form, and lines that no reader may accept."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.rank_traces import tensor_id
from ttrace.layouts.ids import Kind, Site, TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.region import Region
from ttrace.trace.format import DTYPES, Record
from ttrace.trace.lines import encode
from ttrace.untrusted import HIDDEN, clean_line
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Permutation, Rows
from ttrace.values.stats import Stats

words = st.from_regex(r"[^/@\s]+", fullmatch=True).filter(lambda word: not HIDDEN.search(word))
lines = st.text().map(clean_line)
names = st.one_of(words, st.sampled_from([".", "layers.3.mlp.fc1", "größe.重み", 'a"b\\c']))


kinds = st.sampled_from(list(Kind))
naturals = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def ids(draw: st.DrawFn) -> TensorId:
    site = Site(draw(names), draw(kinds), draw(st.one_of(st.just(""), words)))
    return TensorId(draw(naturals), draw(st.none() | naturals), site, draw(st.integers(0, 9)))


@st.composite
def ranges(draw: st.DrawFn, size: int) -> tuple[tuple[int, int], ...]:
    """Draw ranges that are disjoint and not empty, in any order."""
    marks = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    return tuple(draw(st.permutations(list(zip(marks[::2], marks[1::2], strict=False)))))


@st.composite
def regions(draw: st.DrawFn) -> Region:
    shape = tuple(draw(st.lists(st.integers(0, 50), max_size=4)))
    region = Region.whole(shape)
    if draw(st.booleans()):
        region = Region(shape, tuple(draw(ranges(size)) for size in shape))
    if draw(st.booleans()):
        region = replace(region, flat=draw(ranges(math.prod(region.box_shape))))
    return region


numbers = st.integers(-(2**63), 2**63 - 1)
shares = st.floats(0.0, 1.0)
distributions: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(Normal, floats, floats),
    st.builds(Integers, numbers, numbers, keep=shares, hole=numbers),
    st.builds(Rows, st.integers(1, 2**63 - 1), keep=shares, hole=numbers),
    st.builds(Mask, shares),
    st.just(Permutation()),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    region = draw(st.none() | regions())
    shape = tuple(draw(st.lists(st.integers(0, 2**14), max_size=4))) if region is None else region.local_shape
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    begin = 8 * draw(naturals)
    squares = st.floats(0.0, allow_infinity=True)
    sums = {"aa": squares, "bb": squares, "dd": squares, "ab": floats, "nan_b": naturals}
    stats = draw(st.none() | st.builds(Stats, st.just(math.prod(shape)), **sums))
    return Record(
        id=draw(ids()),
        shape=shape,
        dtype=dtype,
        region=region,
        pending=tuple(draw(st.lists(st.sampled_from(["tp", "cp", "dp"]), unique=True))),
        layout=draw(lines),
        by=draw(st.none() | st.builds(Provenance, st.sampled_from(LayoutSource), lines)),
        order=draw(naturals),
        microbatch=draw(naturals),
        values=draw(st.none() | distributions),
        chunk=draw(naturals),
        begin=begin,
        end=begin + (8 * draw(st.integers(0, 3)) if stats else math.prod(shape) * dtype.itemsize),
        stats=stats,
    )


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


GOOD: dict[str, Any] = json.loads(
    encode(
        Record(
            id=tensor_id(),
            shape=(4, 6),
            dtype=torch.float32,
            region=Region((8, 6), (((6, 8), (0, 2)), ((0, 6),))),
            pending=("tp",),
            values=Integers(0, 9),
            begin=1000,
            end=1096,
        )
    )
)


FLAT = {"shape": [8, 6], "flat": [[0, 24]]}
HOSTILE: dict[str, dict[str, Any]] = {
    "stats of other elements": {"stats": [23, 1.0, 1.0, 0.0, 1.0, 0, 0, 0, 0], "at": [0, 0, 0]},
    "stats too few": {"stats": [24, 1.0, 1.0, 0.0, 1.0, 0, 0, 0], "at": [0, 0, 0]},
    "stats of text": {"stats": ["24", 1.0, 1.0, 0.0, 1.0, 0, 0, 0, 0], "at": [0, 0, 0]},
    "stats not a number": {"stats": [24, math.nan, 1.0, 0.0, 1.0, 0, 0, 0, 0], "at": [0, 0, 0]},
    "stats of a negative square": {"stats": [24, 1.0, 1.0, -1e-9, 1.0, 0, 0, 0, 0], "at": [0, 0, 0]},
    "stats negative": {"stats": [24, 1.0, 1.0, 0.0, 1.0, 0, 0, 0, -1], "at": [0, 0, 0]},
    "stats with half an index": {"stats": [24, 1.0, 1.0, 0.0, 1.0, 0, 0, 0, 0], "at": [0, 0, 12]},
    "id no text": {"id": 7},
    "id no id": {"id": "layer/output"},
    "kind unknown": {"id": "0/0/layer/thought"},
    "shape no list": {"shape": 24},
    "shape of text": {"shape": ["4", "6"]},
    "shape text": {"shape": "46"},
    "shape of floats": {"shape": [4.0, 6.0]},
    "shape of booleans": {"shape": [True, True], "at": [0, 0, 4], "region": None},
    "shape negative": {"shape": [-4, -6]},
    "shape missing": {"shape": None},
    "shape larger than the bytes": {"shape": [4, 7], "region": None},
    "shape smaller than the bytes": {"shape": [4, 5], "region": None},
    "shape huge": {"shape": [2**70, 2**70], "region": None},
    "dtype unknown": {"dtype": "F4"},
    "dtype no text": {"dtype": ["F32"]},
    "dtype larger than the bytes": {"dtype": "F64"},
    "bytes between two numbers": {"at": [0, 1001, 1097]},
    "bytes beyond any file": {"at": [0, 2**63, 2**63 + 96]},
    "id with an escape sequence": {"id": "0/0/layer\x1b[31m/output"},
    "id with another direction": {"id": "0/0/layer\u202e/output"},
    "order of many digits": {"order": 10**400},
    "bytes backwards": {"at": [0, 1096, 1000]},
    "bytes negative": {"at": [0, -96, 0]},
    "bytes of floats": {"at": [0, 1000.0, 1096.0]},
    "bytes of two": {"at": [0, 96]},
    "chunk negative": {"at": [-1, 1000, 1096]},
    "chunk a path": {"at": ["../../etc/passwd", 1000, 1096]},
    "checksum missing": {"crc": None},
    "checksum a number": {"crc": 12345678},
    "checksum of seven digits": {"crc": "1234567"},
    "checksum no hex digits": {"crc": "0x123456"},
    "checksum of other digits": {"crc": "1234567٣"},
    "order no number": {"order": "first"},
    "microbatch no number": {"mb": None},
    "microbatch negative": {"mb": -1},
    "pending text": {"pending": "tp"},
    "pending of numbers": {"pending": [1]},
    "layout no text": {"layout": ["seq/tp"]},
    "by no text": {"by": 5},
    "by nobody known": {"by": "hearsay"},
    "detail without by": {"detail": "rule 3"},
    "region text": {"region": "whole"},
    "region without shape": {"region": {"dims": []}},
    "region shape negative": {"region": {"shape": [-4, 6]}},
    "region of too few dims": {"region": {"shape": [8, 6], "dims": [[[0, 4]]]}},
    "region of too many dims": {"region": {"shape": [8, 6], "dims": [[[0, 4]], [[0, 6]], []]}},
    "range beyond its dim": {"region": {"shape": [8, 6], "dims": [[[5, 9]], [[0, 6]]]}},
    "range before its dim": {"region": {"shape": [8, 6], "dims": [[[-1, 3]], [[0, 6]]]}},
    "range empty": {"region": {"shape": [8, 6], "dims": [[[0, 4], [5, 5]], [[0, 6]]]}},
    "range backwards": {"region": {"shape": [8, 6], "dims": [[[4, 0]], [[0, 6]]]}},
    "range of floats": {"region": {"shape": [8, 6], "dims": [[[0, 4.0]], [[0, 6]]]}},
    "range of three": {"region": {"shape": [8, 6], "dims": [[[0, 2, 4]], [[0, 6]]]}},
    "region of another shape than the data": {"region": {"shape": [8, 6]}},
    "flat region of a matrix": {"region": FLAT},
    "flat range beyond the tensor": {"region": {"shape": [8, 6], "flat": [[30, 54]]}, "shape": [24]},
    "flat range beyond the box": {
        "region": {"shape": [8, 6], "dims": [[[0, 4]], [[0, 5]]], "flat": [[0, 24]]},
        "shape": [24],
    },
    "flat range negative": {"region": {"shape": [8, 6], "flat": [[-4, 20]]}, "shape": [24]},
    "distribution unknown": {"values": {"kind": "Pickle"}},
    "distribution without kind": {"values": {"low": 0, "high": 9}},
    "distribution kind no text": {"values": {"kind": ["Normal"]}},
    "distribution of unknown arguments": {"values": {"kind": "Normal", "code": "rm"}},
    "distribution of too few arguments": {"values": {"kind": "Integers", "low": 0}},
    "distribution of text": {"values": {"kind": "Normal", "std": "1.0"}},
    "distribution of floats for integers": {"values": {"kind": "Integers", "low": 0.5, "high": 9}},
    "distribution not finite": {"values": {"kind": "Normal", "std": math.inf}},
    "distribution of no rows": {"values": {"kind": "Rows", "num_rows": 0}},
    "distribution of too many rows": {"values": {"kind": "Rows", "num_rows": 2**64}},
    "distribution that keeps more than all": {"values": {"kind": "Mask", "keep": 1.5}},
    "sketch of buckets that none has": {"sketch": [63, 0.5], "at": [0, 0, 504]},
    "distribution no object": {"values": "Normal"},
    "unknown field": {"surprise": 1},
}
