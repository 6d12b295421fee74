"""Columns of a table packed into short strings, which a browser decodes at once."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable
from typing import Any

_LARGEST = 3e38
"""Larger numbers do not fit into four bytes and become infinite."""


def pack_floats(values: Iterable[float]) -> dict[str, str]:
    """Pack numbers in single precision; infinities and NaN are kept."""
    return _pack("f", array("f", (value if abs(value) < _LARGEST else value * 2 for value in values)))


def pack_integers(values: Iterable[int]) -> dict[str, str]:
    """Pack integers, each in as few bytes as the largest of them needs."""
    values = list(values)
    most = max((value if value >= 0 else -value - 1 for value in values), default=0)
    kind = next(kind for kind, bits in _INTEGERS if most < 1 << bits)
    return _pack(kind, array(kind, values))


_INTEGERS = (("b", 7), ("h", 15), ("i", 31), ("d", 1000))
"""The last is of floats, as a browser's own numbers are: a step may have 18 digits."""


def pack_words(values: Iterable[str]) -> dict[str, Any]:
    """Pack texts that repeat: each text once, and an index for every row."""
    known: dict[str, int] = {}
    rows = [known.setdefault(value, len(known)) for value in values]
    return {"words": list(known), **pack_integers(rows)}


def _pack(kind: str, values: array[Any]) -> dict[str, str]:
    if sys.byteorder == "big":
        values.byteswap()
    return {"as": kind, "data": base64.b64encode(values.tobytes()).decode()}
