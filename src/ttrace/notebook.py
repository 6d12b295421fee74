"""HTML that shows an object in a notebook: a title and a small table. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ttrace.untrusted import clean_line

_MOST_ROWS = 10


def make_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Make a title and a table of the first rows; without rows, only the title."""
    line = f"<p><b>{escape(clean_line(title))}</b></p>"
    if not rows:
        return line
    more = len(rows) - _MOST_ROWS
    last = f"<p>... and {more} more</p>" if more > 0 else ""
    body = "".join(_make_row("td", row) for row in rows[:_MOST_ROWS])
    return f"{line}<table><thead>{_make_row('th', head)}</thead><tbody>{body}</tbody></table>{last}"


def _make_row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(clean_line(str(cell)))}</{tag}>' for cell in cells)}</tr>"
