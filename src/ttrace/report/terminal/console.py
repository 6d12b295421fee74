"""Console that shows texts of others as they are: none of them moves the cursor, hides a word or commands a CI log."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ttrace.text import clean_text


class CleanConsole(Console):
    """A console of rich whose styles are its own alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render segments; the text of each is cleaned, and escape sequences of styles come after that."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else clean_text(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)
