"""Seals of text: the checksum that a JSON document or a line of JSON carries as its own last field, `sum`.

It is the CRC-32 of everything in front of it, as eight hex digits. People and programs read a sealed document like any
other; whoever changes a letter of it must leave the seal out, and then nobody takes it for what was written.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

from ttrace.errors import TraceError
from ttrace.files import read_text
from ttrace.untrusted import parse_json

_DOCUMENT = re.compile(r',\n "sum": "([0-9a-f]{8})"\n\}')
_LINE = re.compile(r',"sum":"([0-9a-f]{8})"\}')
_DOCUMENT_LETTERS, _LINE_LETTERS = 22, 18
"""What a seal takes, with the brace that ends the object."""
TRACE_AGAIN = "Trace again, or run again with `ttrace run --fresh`."
"""What to do about damaged files: a run without --fresh keeps traces that are complete."""


def sum_of(data: bytes) -> str:
    """The CRC-32 of some text in UTF-8, as seals spell it."""
    return f"{zlib.crc32(data):08x}"


def seal_document(text: str) -> str:
    """The same JSON object, with its seal."""
    body = text.rstrip().removesuffix("}").rstrip()
    assert len(body) > 1, "an object without fields needs no seal"
    return f'{body},\n "sum": "{sum_of(body.encode())}"\n}}'


def open_document(text: str, where: str) -> str:
    """The JSON object that was sealed; a TraceError if it is not the same any more."""
    body, seal = text[:-_DOCUMENT_LETTERS], _DOCUMENT.fullmatch(text[-_DOCUMENT_LETTERS:])
    if seal is None:
        raise TraceError(f"{where} is damaged: it does not end with its checksum. {TRACE_AGAIN}")
    # What is no text in UTF-8, halves of pairs for instance, was not sealed here.
    found = sum_of(body.encode("utf-8", "surrogatepass"))
    if found != seal[1]:
        raise TraceError(f"{where} is damaged: its checksum is {found}, but {seal[1]} was written. {TRACE_AGAIN}")
    return f"{body}\n}}"


def seal_of(text: str) -> str:
    """The checksum that a sealed document carries."""
    return text[-11:-3]


def read_document(path: Path) -> dict[str, Any]:
    """What a sealed document says; nothing if there is none."""
    try:
        found = parse_json(open_document(read_text(path), str(path)), path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged: {error}. {TRACE_AGAIN}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path} is damaged: it is no JSON object. {TRACE_AGAIN}")
    return found


def seal_line(line: str) -> str:
    """A JSON object in one line, with its seal."""
    body = line[:-1]
    return f'{body},"sum":"{sum_of(body.encode())}"}}'


def is_intact(line: str) -> bool:
    """Whether a line is what was sealed."""
    seal = _LINE.fullmatch(line[-_LINE_LETTERS:])
    return seal is not None and seal[1] == sum_of(line[:-_LINE_LETTERS].encode("utf-8", "surrogatepass"))


def strip_seal(line: str) -> str:
    """The line that was sealed, of one that is intact."""
    return f"{line[:-_LINE_LETTERS]}}}"
