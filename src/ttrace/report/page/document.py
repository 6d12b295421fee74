"""This module makes one HTML file of a page's data, the style, the scripts and the plotting library.

The file loads nothing, and a policy in its head forbids it to. Texts of traces stand in it as JSON, in which no tag can
begin, and its scripts show them as text only.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

_STYLES = ("uPlot.min.css", "page.css")
_FIRST = ("dom.js", "words.js", "head.js")
_REST = ("data.js", "plots.js", "tree.js", "maps.js", "tables.js", "list.js", "page.js")
"""What needs the tensors, of which there may be many: read when the first screen is there."""


def render_document(data: dict[str, Any]) -> str:
    """The whole file."""
    filled = {
        "STYLE": "\n".join(map(_file, _STYLES)),
        "PAGE": _json({name: value for name, value in data.items() if name != "tensors"}),
        "FIRST": "\n".join(map(_file, _FIRST)),
        "TENSORS": _json(data["tensors"]),
        "LIBRARY": _file("uPlot.iife.min.js"),
        "REST": "\n".join(map(_file, _REST)),
    }
    head, *rest = _file("page.html").split("{{")
    parts = [head]
    for part in rest:  # in one pass: what is filled in is never looked at again
        name, _, after = part.partition("}}")
        parts += [filled[name], after]
    return "".join(parts)


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (resources.files("ttrace.report.page") / "html" / name).read_text(encoding="utf-8")
