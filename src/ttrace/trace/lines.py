"""Records as lines of JSON: encoding, and decoding with all checks.

Encoding is done by hand, because the training step waits for thousands of lines. Decoding is fast because most lines
differ only in their id and a few numbers. The rest of a line, its form, is parsed once and then cached: a job of
thousands of ranks has a million lines, but only a few hundred forms.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ttrace.errors import TraceError, TTraceError
from ttrace.layouts.ids import TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region
from ttrace.trace.format import (
    DTYPE_NAMES,
    DTYPES,
    Count,
    Line,
    PositiveCount,
    Record,
    SketchInfo,
    check_place,
    check_region,
    is_fitting,
)
from ttrace.untrusted import MOST
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Permutation, Rows, Signed
from ttrace.values.sketch import WORD_BUCKETS
from ttrace.values.stats import Stats

_DISTRIBUTIONS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Normal, Signed, Integers, Rows, Mask, Permutation)
}
_NUMBER = "(0|[1-9][0-9]{0,17})"
_FLOAT = r"(-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e[-+]?[0-9]{1,3})?)"
_SIZE = r"(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e[-+]?[0-9]{1,3})?"
_LINE = re.compile(
    rf'\{{"id":"([^"\\\x00-\x1f]*)",(.*?),"order":{_NUMBER},"mb":{_NUMBER},"us":{_NUMBER},"at":\[{_NUMBER},{_NUMBER},{_NUMBER}\],'
    r'"crc":"([0-9a-f]{8})"'
    rf'(.*?)(?:,"sketch":\[([1-9][0-9]{{0,17}}),{_FLOAT}\])?\}}'
)
_NUMBERS = r"\[(?:0|[1-9][0-9]{0,17})(?:, %s){3}, -?%s(?:, (?:0|[1-9][0-9]{0,17})){4}\]" % ((_SIZE,) * 2)
_WITH_STATS = re.compile(rf'(.*),"stats":({_NUMBERS})\}}')


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse a shape whose strides overflow: torch computes strides for empty tensors too."""
    if math.prod(filter(None, shape)) > MOST:
        raise ValueError("no tensor can have this shape")
    return shape


_Shape = Annotated[tuple[Count, ...], AfterValidator(_check_shape)]


class _RegionEntry(BaseModel):
    """A region in a line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shape: _Shape
    dims: tuple[Ranges, ...] | None = None
    flat: Ranges | None = None


_Numbers = tuple[Count, float, float, float, float, Count, Count, Count, Count]
_STATS = ("count", "aa", "bb", "dd", "ab", "nan_a", "inf_a", "nan_b", "inf_b")
"""The fields of a record's stats in a line, in this order."""


class _Line(BaseModel):
    """The fields of a line, with their types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    shape: _Shape
    dtype: str
    region: _RegionEntry | None
    order: Count
    mb: Count
    us: Count
    at: tuple[Count, Count, Count]
    crc: str = Field(pattern="^[0-9a-f]{8}$")
    pending: tuple[Line, ...] = ()
    layout: Line = ""
    by: Line = ""
    detail: Line = ""
    values: dict[str, Any] | None = None
    sketch: tuple[PositiveCount, float] | None = None
    stats: _Numbers | None = None


class _Form(NamedTuple):
    """The parsed form of a line: a record whose id, numbers and sketch are placeholders."""

    record: Record
    num_bytes: int


def encode(record: Record) -> str:
    """Encode a record as one line of JSON."""
    return encode_at(record, record.order, (record.chunk, record.begin, record.end), record.crc)


def encode_at(record: Record, order: int, at: tuple[int, int, int], crc: int) -> str:
    """Encode a record with this order, place and CRC in place of its own."""
    fields = [
        f'"id":{quoted(str(record.id))},{encode_form(record.dtype, record.shape)}',
        f'"region":{_region_text(record.region)}',
        f'"order":{order},"mb":{record.microbatch},"us":{record.time},"at":[{at[0]},{at[1]},{at[2]}],"crc":"{crc:08x}"',
    ]
    if record.pending:
        fields.append(f'"pending":{json.dumps(record.pending)}')
    if record.layout:
        fields.append(f'"layout":{quoted(record.layout)}')
    if record.by is not None:
        fields.append(_provenance_text(record.by))
    if record.values is not None:
        fields.append(f'"values":{json.dumps({"kind": type(record.values).__name__, **vars(record.values)})}')
    if record.sketch is not None:
        fields.append(f'"sketch":{json.dumps([record.sketch.num_buckets, record.sketch.mean])}')
    if record.stats is not None:
        fields.append(f'"stats":{json.dumps([getattr(record.stats, name) for name in _STATS])}')
    return f"{{{','.join(fields)}}}"


@lru_cache(maxsize=256)  # a model uses few different shapes
def encode_form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Encode dtype and shape, for a line or for a chunk's header."""
    return f'"dtype":"{DTYPE_NAMES[dtype]}","shape":[{",".join(map(str, shape))}]'


def decode(line: str) -> Record:
    """Decode one line; raise TraceError if a damaged or malicious file has anything else there."""
    record = parse_line(line)
    if record.end - record.begin != record.num_bytes and not record.is_generated:
        raise TraceError(f"{record.id}: bytes {record.begin} to {record.end} do not fit shape {record.stored_form[0]}.")
    if record.stats is not None and record.stats.count != math.prod(record.shape):
        raise TraceError(f"{record.id}: stats of {record.stats.count} elements do not fit shape {record.shape}.")
    if record.is_generated and record.sketch is not None:
        raise TraceError(f"{record.id}: its values are generated, so it has no sketch.")
    check_place(record)
    check_region(record)
    return record


def decode_quickly(line: str) -> Record:
    """Decode one line as `decode` does, with the same errors, but faster."""
    measured = _WITH_STATS.fullmatch(line) if '"stats"' in line else None
    match = _LINE.fullmatch(f"{measured[1]}}}" if measured else line)
    if match is None:
        return decode(line)
    text, before, order, microbatch, time, chunk, begin, end, crc, after, num_buckets, mean = match.groups()
    form = _parse_form(before, after)
    if form is None:
        return decode(line)
    shared, num_bytes, at, stop = form.record, form.num_bytes, int(begin), int(end)
    if at % 8 or at > stop or (at == stop and num_buckets is not None):
        return decode(line)
    if num_buckets is not None:
        num_bytes = int(num_buckets) * 8
    try:
        tensor_id = _parse_id(text)
        sketch = None if num_buckets is None else make_sketch_info(int(num_buckets), float(mean))
    except (TTraceError, ValueError):
        return decode(line)
    stats = make_stats(json.loads(measured[2])) if measured else None
    if stats is not None:
        if stats.count != math.prod(shared.shape) or (stop - at) % torch.int64.itemsize:
            return decode(line)
    elif stop - at != num_bytes and not (at == stop and shared.values is not None and shared.region is not None):
        return decode(line)
    return Record(
        tensor_id,
        shared.shape,
        shared.dtype,
        shared.region,
        shared.pending,
        shared.layout,
        shared.by,
        int(order),
        int(microbatch),
        shared.values,
        sketch,
        int(chunk),
        at,
        stop,
        int(crc, 16),
        stats,
        int(time),
    )


def make_stats(numbers: Sequence[float]) -> Stats:
    """Make stats from the numbers in a line."""
    stats = Stats(**dict(zip(_STATS, numbers, strict=True)))  # type: ignore[arg-type]  # some of them are int
    if any(math.isnan(number) for number in numbers) or min(stats.aa, stats.bb, stats.dd) < 0.0:
        raise ValueError("stats must be numbers, and sums of squares not negative")
    return stats


def make_sketch_info(num_buckets: int, mean: float) -> SketchInfo:
    """Make the description of a sketch from the numbers in a line."""
    if num_buckets % WORD_BUCKETS or not math.isfinite(mean):
        raise ValueError(f"a sketch has a multiple of {WORD_BUCKETS} buckets, and a finite mean")
    return SketchInfo(num_buckets, mean)


def parse_line(line: str) -> Record:
    """Parse a line, without checking that its shape, region and bytes are consistent."""
    try:
        entry = _Line.model_validate_json(line)
        return Record(
            id=TensorId.parse(entry.id),
            shape=entry.shape,
            dtype=DTYPES[entry.dtype],
            region=None if entry.region is None else _decode_region(entry.region),
            pending=entry.pending,
            layout=entry.layout,
            by=_decode_provenance(entry),
            order=entry.order,
            microbatch=entry.mb,
            values=_decode_distribution(entry.values),
            sketch=None if entry.sketch is None else make_sketch_info(*entry.sketch),
            chunk=entry.at[0],
            begin=entry.at[1],
            end=entry.at[2],
            crc=int(entry.crc, 16),
            stats=None if entry.stats is None else make_stats(entry.stats),
            time=entry.us,
        )
    except (ValueError, KeyError, TypeError, TTraceError) as error:
        reason = " ".join(str(error).split())
        raise TraceError(f"unreadable record {line[:120]!r} ({type(error).__name__}: {reason}).") from None


@lru_cache(maxsize=256)
def _region_text(region: Region | None) -> str:
    if region is None:
        return "null"
    entry: dict[str, Any] = {"shape": region.shape}
    if region.dims != Region.whole(region.shape).dims:
        entry["dims"] = region.dims
    if region.flat is not None:
        entry["flat"] = region.flat
    return json.dumps(entry, separators=(",", ":"))


@lru_cache(maxsize=256)
def _provenance_text(by: Provenance) -> str:
    detail = f',"detail":{quoted(by.detail)}' if by.detail else ""
    return f'"by":"{by.source.value}"{detail}'


def _decode_provenance(entry: _Line) -> Provenance | None:
    if not entry.by:
        if entry.detail:
            raise ValueError("a detail needs a source of the layout")
        return None
    return Provenance(LayoutSource(entry.by), entry.detail)


def _decode_region(entry: _RegionEntry) -> Region:
    whole = Region.whole(entry.shape)
    region = Region(entry.shape, whole.dims if entry.dims is None else entry.dims, entry.flat)
    if len(region.dims) != len(region.shape):
        raise ValueError("a region needs ranges for every dim")
    for ranges, size in zip(region.dims, region.shape, strict=True):
        _check_ranges(ranges, size)
    _check_ranges(region.flat or (), math.prod(region.box_shape))
    return region


def _check_ranges(ranges: Ranges, size: int) -> None:
    if any(not 0 <= start < stop <= size for start, stop in ranges):
        raise ValueError("a range lies outside its dim")


def _decode_distribution(entry: dict[str, Any] | None) -> Distribution | None:
    if entry is None:
        return None
    arguments = dict(entry)
    distribution = _DISTRIBUTIONS[arguments.pop("kind")](**arguments)
    for field in fields(distribution):
        if type(getattr(distribution, field.name)) not in ((int,) if field.type == "int" else (int, float)):
            raise TypeError(f"{field.name} of {distribution} is not of type {field.type}")
        _check_parameter(field.name, getattr(distribution, field.name))
    typed: Distribution = distribution
    return typed


def _check_parameter(name: str, value: float) -> None:
    """Refuse parameters of a distribution that values cannot be generated with."""
    # math.isfinite raises OverflowError for integers of hundreds of digits.
    if not (-MOST - 1 <= value <= MOST if isinstance(value, int) else math.isfinite(value)):
        raise ValueError(f"{name} is {value}, but must be finite and fit into 64 bits")
    least = {"num_rows": 1, "limit": 0}.get(name, value)
    if (name == "keep" and not 0.0 <= value <= 1.0) or value < least:
        raise ValueError(f"{name} is {value}, but keep must be from 0 to 1, num_rows at least 1 and limit at least 0")


@lru_cache(maxsize=1 << 12)
def _parse_form(before: str, after: str) -> _Form | None:
    """Parse the form of a line; None if it contains fields that belong outside of it."""
    try:
        record = parse_line(
            f'{{"id":"7/7/form/output",{before},"order":1,"mb":2,"us":7,"at":[3,4,5],"crc":"00000006"{after}}}'
        )
    except TTraceError:
        return None
    # A repeated key would replace a placeholder.
    placeholders = (
        str(record.id),
        record.order,
        record.microbatch,
        record.chunk,
        record.begin,
        record.end,
        record.crc,
        record.time,
    )
    is_form = (*placeholders, record.sketch, record.stats) == ("7/7/form/output", 1, 2, 3, 4, 5, 6, 7, None, None)
    return _Form(record, record.num_bytes) if is_form and is_fitting(record) else None


@lru_cache(maxsize=1 << 18)  # reference, twins and candidate have the same ids
def _parse_id(text: str) -> TensorId:
    return TensorId.parse(text)
