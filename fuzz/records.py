"""Hostile records: changes of several fields that fit each other, so that a reader goes on to the record's values."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from fuzz.mutation import NUMBERS, mutate_json_text
from ttrace.layouts.ids import Kind
from ttrace.trace.format import DTYPES

_SIZES = (0, 1, 2, 3, 4, 6, 8, 24, 48, 64)
_LARGE = (10**5, 10**6, 2**31, 2**40, 2**62, 2**63)
_NUM_BUCKETS = (1, 8, 63, 64, 128, 1 << 20)
_KINDS = ("Normal", "Signed", "Integers", "Rows", "Mask", "Permutation")
_FIELDS = {
    "Normal": ("mean", "std"),
    "Signed": ("size",),
    "Integers": ("low", "high", "keep", "hole"),
    "Rows": ("num_rows", "keep", "hole"),
    "Mask": ("keep",),
}


def mutate_record(line: bytes, random: Random) -> bytes:
    """Change a record's line: mostly one field, and the others so that they fit it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or random.random() < 0.4:
        return mutate_json_text(line, random)
    change = random.choice((_change_shape, _change_region, _change_dtype, _change_form, _change_values, _change_id))
    try:
        change(entry, random)
        if random.random() < 0.85:
            _fit_place(entry, random)
    except (TypeError, KeyError, IndexError):  # an earlier change has left no record
        return mutate_json_text(line, random)
    return json.dumps(entry, separators=(",", ":")).encode()


def _change_shape(entry: dict[str, Any], random: Random) -> None:
    sizes = (*_SIZES, *_LARGE) if random.random() < 0.1 else _SIZES
    entry["shape"] = [random.choice(sizes) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 9)))]
    entry["region"] = {"shape": entry["shape"]} if random.random() < 0.8 else None


def _change_region(entry: dict[str, Any], random: Random) -> None:
    """Draw a region, and give the record its shape."""
    shape = [random.choice(_SIZES[1:]) for _ in range(random.choice((1, 1, 2, 3)))]
    dims = [_draw_ranges(size, random) for size in shape]
    region: dict[str, Any] = {"shape": shape, "dims": dims}
    entry["shape"] = [sum(stop - start for start, stop in ranges) for ranges in dims]
    if random.random() < 0.4:
        region["flat"] = _draw_ranges(math.prod(entry["shape"]), random)
        entry["shape"] = [sum(stop - start for start, stop in region["flat"])]
    entry["region"] = region


def _draw_ranges(size: int, random: Random) -> list[list[int]]:
    """Draw ranges of a dim: in any order, and some of them twice."""
    bounds = [
        sorted((random.randrange(size + 1), random.randrange(size + 1))) for _ in range(random.choice((1, 1, 2, 4)))
    ]
    return [bound for bound in bounds if bound[0] < bound[1]]


def _change_dtype(entry: dict[str, Any], random: Random) -> None:
    entry["dtype"] = random.choice(sorted(DTYPES))


def _change_form(entry: dict[str, Any], random: Random) -> None:
    """Let the record be of values, of a sketch, or of stats."""
    entry.pop("sketch", None), entry.pop("stats", None)
    form = random.randrange(3)
    if form == 1:
        entry["sketch"] = [random.choice(_NUM_BUCKETS), random.choice((0.0, 0.5, 1e300))]
    elif form == 2:
        count = math.prod(entry["shape"]) if _is_shape(entry.get("shape")) else 1
        entry["stats"] = [count, 1.0, 1.0, 0.5, 0.5, *(random.choice((0, 1, count)) for _ in range(4))]


def _change_values(entry: dict[str, Any], random: Random) -> None:
    """Let the values be generated."""
    kind = random.choice(_KINDS)
    entry["values"] = {"kind": kind}
    for name in _FIELDS.get(kind, ()):
        entry["values"][name] = random.choice(NUMBERS) if random.random() < 0.3 else random.choice((0, 1, 7, 0.5))
    if random.random() < 0.8:
        entry["at"] = [0, 0, 0]


def _change_id(entry: dict[str, Any], random: Random) -> None:
    kind = random.choice([kind.value for kind in Kind])
    name = random.choice(("layers.0", "layers.0.weight", "layers.1", "made", "wide", "measured", "."))
    entry["id"] = f"{random.choice((0, 0, 1, 10**17))}/{random.choice(('-', '0', '1'))}/{name}/{kind}"


def _fit_place(entry: dict[str, Any], random: Random) -> None:
    """Let the record have as many bytes as its shape and dtype need."""
    if entry.get("values") and entry.get("at") == [0, 0, 0]:
        return
    if not _is_shape(entry.get("shape")) or entry.get("dtype") not in DTYPES:
        return
    num_bytes = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    if entry.get("sketch"):
        num_bytes = entry["sketch"][0] * 8
    if entry.get("stats"):
        num_bytes = random.choice((0, 8, 16))
    begin = random.choice((0, 8, 16, 64)) if random.random() < 0.95 else random.choice((1, 4, 10**6))
    entry["at"] = [0, begin, begin + num_bytes]


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int for size in value)
