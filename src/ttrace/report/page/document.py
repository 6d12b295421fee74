"""The HTML file of a report: the page's data, the style, the scripts and the plotting library in one.

The file loads nothing, and a policy in its head forbids it to. Texts from traces are embedded as JSON, in which no tag
can begin, and the scripts show them only as text. Columns of tables are packed into short strings, which a browser
decodes at once.
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Iterable
from importlib import resources
from typing import Any

_STYLES = ("uPlot.min.css", "page.css")
_FIRST = ("dom.js", "words.js", "head.js")
_REST = ("data.js", "plots.js", "tree.js", "maps.js", "tables.js", "list.js", "page.js")
"""Scripts that need the tensors, of which there may be many: they run after the first screen is shown."""


def render_document(data: dict[str, Any]) -> str:
    """Render the whole file."""
    filled = {
        "STYLE": "\n".join(map(_read_file, _STYLES)),
        "PAGE": _dump_json({name: value for name, value in data.items() if name != "tensors"}),
        "FIRST": "\n".join(map(_read_file, _FIRST)),
        "TENSORS": _dump_json(data["tensors"]),
        "LIBRARY": _read_file("uPlot.iife.min.js"),
        "REST": "\n".join(map(_read_file, _REST)),
    }
    head, *rest = _read_file("page.html").split("{{")
    parts = [head]
    for part in rest:  # in one pass, so that text that was filled in is never parsed again
        name, _, after = part.partition("}}")
        parts += [filled[name], after]
    return "".join(parts)


def _dump_json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _read_file(name: str) -> str:
    return (resources.files("ttrace.report.page") / "html" / name).read_text(encoding="utf-8")


_LARGEST = 3e38
"""Larger numbers do not fit into four bytes and become infinite."""


def pack_floats(values: Iterable[float]) -> dict[str, str]:
    """Pack numbers in single precision; infinities and NaN are preserved."""
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
