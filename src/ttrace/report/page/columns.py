"""This module packs a table into few bytes of text: one string for each column, which a browser reads at once."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable
from typing import Any

_LARGEST = 3e38
"""What is larger has no place in four bytes, and is infinite."""


def pack_floats(values: Iterable[float]) -> dict[str, str]:
    """Numbers in single precision; not finite ones stay as they are."""
    return _pack("f", array("f", (value if abs(value) < _LARGEST else value * 2 for value in values)))


def pack_integers(values: Iterable[int]) -> dict[str, str]:
    """Whole numbers, each in as few bytes as the largest of them needs."""
    values = list(values)
    most = max((value if value >= 0 else -value - 1 for value in values), default=0)
    kind = next(kind for kind, bits in _INTEGERS if most < 1 << bits)
    return _pack(kind, array(kind, values))


_INTEGERS = (("b", 7), ("h", 15), ("i", 31))


def pack_words(values: Iterable[str]) -> dict[str, Any]:
    """Texts that repeat: each once, and which it is for every row."""
    known: dict[str, int] = {}
    rows = [known.setdefault(value, len(known)) for value in values]
    return {"words": list(known), **pack_integers(rows)}


def _pack(kind: str, values: array[Any]) -> dict[str, str]:
    if sys.byteorder == "big":
        values.byteswap()
    return {"as": kind, "data": base64.b64encode(values.tobytes()).decode()}
