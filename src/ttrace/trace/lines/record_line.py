"""Records as lines of JSON: how they are written, and read again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ttrace.errors import TraceError, TTraceError
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.layouts.source import LayoutSource, Provenance
from ttrace.tensors.ranges import Ranges
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
)
from ttrace.untrusted import MOST
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Permutation, Rows, Signed
from ttrace.values.sketch import WORD_BUCKETS
from ttrace.values.stats import Stats

_DISTRIBUTIONS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Normal, Signed, Integers, Rows, Mask, Permutation)
}


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse a shape that no tensor can have, not even an empty one: torch counts its strides."""
    if math.prod(filter(None, shape)) > MOST:
        raise ValueError("no tensor can have this shape")
    return shape


_Shape = Annotated[tuple[Count, ...], AfterValidator(_check_shape)]


class _RegionEntry(BaseModel):
    """A region as a line has it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shape: _Shape
    dims: tuple[Ranges, ...] | None = None
    flat: Ranges | None = None


_Numbers = tuple[Count, float, float, float, float, Count, Count, Count, Count]
_STATS = ("count", "aa", "bb", "dd", "ab", "nan_a", "inf_a", "nan_b", "inf_b")
"""What a line has of a record's stats, in this order."""


class _Line(BaseModel):
    """A record as a line has it: the types of its fields."""

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


def encode(record: Record) -> str:
    """Encode a record as one line of JSON."""
    return encode_at(record, record.order, (record.chunk, record.begin, record.end), record.crc)


def encode_at(record: Record, order: int, at: tuple[int, int, int], crc: int) -> str:
    """Encode a record with another order, place and CRC; by hand, as a step waits for thousands of lines."""
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
        kept = record.sketch
        fields.append(f'"sketch":{json.dumps([kept.num_buckets, kept.mean])}')
    if record.stats is not None:
        fields.append(f'"stats":{json.dumps([getattr(record.stats, name) for name in _STATS])}')
    return f"{{{','.join(fields)}}}"


@lru_cache(maxsize=256)  # most tensors of a model share a few shapes
def encode_form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Encode dtype and shape, for a line and for a chunk's header."""
    return f'"dtype":"{DTYPE_NAMES[dtype]}","shape":[{",".join(map(str, shape))}]'


def decode(line: str) -> Record:
    """Decode one line; raise TraceError for anything that a hostile or damaged file may hold."""
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


def make_stats(numbers: Sequence[float]) -> Stats:
    """Make the stats of the numbers in a line."""
    found = Stats(**dict(zip(_STATS, numbers, strict=True)))  # type: ignore[arg-type]  # some of them are int
    if any(math.isnan(number) for number in numbers) or min(found.aa, found.bb, found.dd) < 0.0:
        raise ValueError("stats must be numbers, and sums of squares not negative")
    return found


def make_sketch_info(num_buckets: int, mean: float) -> SketchInfo:
    """Make what a line says of a sketch."""
    if num_buckets % WORD_BUCKETS or not math.isfinite(mean):
        raise ValueError(f"a sketch has a multiple of {WORD_BUCKETS} buckets, and a finite mean")
    return SketchInfo(num_buckets, mean)


def parse_line(line: str) -> Record:
    """Parse a line, without checking that its shape, region and bytes fit each other."""
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
            raise ValueError("a detail needs to say who decided")
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
    made = _DISTRIBUTIONS[arguments.pop("kind")](**arguments)
    for field in fields(made):
        if type(getattr(made, field.name)) not in ((int,) if field.type == "int" else (int, float)):
            raise TypeError(f"{field.name} of {made} is no {field.type}")
        _check_parameter(field.name, getattr(made, field.name))
    drawn: Distribution = made
    return drawn


def _check_parameter(name: str, value: float) -> None:
    """Refuse a parameter with which nothing can be generated."""
    # math.isfinite cannot take an integer of hundreds of digits.
    if not (-MOST - 1 <= value <= MOST if isinstance(value, int) else math.isfinite(value)):
        raise ValueError(f"{name} is {value}, but must be finite and fit into 64 bits")
    if (name == "keep" and not 0.0 <= value <= 1.0) or (name == "num_rows" and value < 1):
        raise ValueError(f"{name} is {value}, but keep is a share, and a table has rows")
