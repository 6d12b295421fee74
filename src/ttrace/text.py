"""Texts of others: names and notes of a trace may hold anything, and are shown in terminals, logs and pages."""

from __future__ import annotations

import re

_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, escape sequences among them; not tab and newline
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"  # characters without width
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # other newlines, and what changes the direction of reading
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e0fff"  # halves of characters, and tags
)
HIDDEN = re.compile(f"[{_HIDDEN}]")
"""Characters that are not seen, but change what is."""
_COMMAND = re.compile(r"^([ \t]*):(?=:)|##(?=\[)", re.MULTILINE)
"""What begins a command in the logs of GitHub's and other runners."""


def clean_text(text: str) -> str:
    """Replace what could deceive a reader, or command a terminal or the runner that keeps a log; newlines stay."""
    text = text if text.isascii() and text.isprintable() else HIDDEN.sub("?", text)
    return _COMMAND.sub(lambda match: f"{match[0]} ", text) if "::" in text or "##[" in text else text


def clean_line(text: str) -> str:
    """Do the same, and make it one line."""
    return clean_text(
        text
        if text.isascii() and text.isprintable()
        else " ".join(part for part in re.split(r"[\t\n\r]+", text) if part)
    )
