"""How a command reports an error, for people and for programs.

Nothing here imports torch: the error may be that torch cannot be imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ttrace.untrusted import clean_text

SCHEMA = 1
"""The version of the JSON report's form."""
_UNJUDGED = 2


class CleanConsole(Console):
    """A console in which texts from traces cannot move the cursor, hide a word or command a CI log."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render segments; the text of each is cleaned, and escape sequences of styles come after that."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else clean_text(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)


def make_failure_report(message: str) -> dict[str, Any]:
    """Make a JSON report, in the form of every other one, whose only content is a problem."""
    return {
        "schema": SCHEMA,
        "exit": _UNJUDGED,
        "counts": {},
        "findings": [],
        "problems": [message],
        "notes": [],
        "reach": None,
        "next": "",
        "tensors": [],
    }
