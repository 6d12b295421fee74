"""The HTML file of a report: the page's data, the style, the scripts and the plotting library in one.

The file loads nothing, and a policy in its head forbids it to. Texts from traces are embedded as JSON, in which no tag
can begin, and the scripts show them only as text.
"""

from __future__ import annotations

import json
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
