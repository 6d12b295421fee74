"""Seals of text: the checksum that a JSON document or a line of JSON carries as its own last field, `sum`.

A seal is the CRC-32 of everything before it, as eight hex digits. A sealed document can be read like any other JSON. If
it is edited, the seal no longer matches, and it is refused. Fingerprints show whether any other file has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrace.errors import TraceError
from ttrace.untrusted import open_regular, parse_json, read_text

_DOCUMENT = re.compile(r',\n "sum": "([0-9a-f]{8})"\n\}')
_LINE = re.compile(r',"sum":"([0-9a-f]{8})"\}')
_DOCUMENT_LENGTH, _LINE_LENGTH = 22, 18
"""The number of characters of a seal, including the brace that ends the object."""
TRACE_AGAIN = "Trace again, or run again with `ttrace run --fresh`."
"""The advice for damaged files. A run without --fresh would keep traces that are complete."""


def sum_of(data: bytes) -> str:
    """Return the CRC-32 of a text in UTF-8, as eight hex digits."""
    return f"{zlib.crc32(data):08x}"


def seal_document(text: str) -> str:
    """Add a seal to a JSON object."""
    body = text.rstrip().removesuffix("}").rstrip()
    assert len(body) > 1, "an object without fields needs no seal"
    return f'{body},\n "sum": "{sum_of(body.encode())}"\n}}'


def open_document(text: str, where: str) -> str:
    """Return the JSON object without its seal; raise TraceError if it was changed."""
    body, seal = text[:-_DOCUMENT_LENGTH], _DOCUMENT.fullmatch(text[-_DOCUMENT_LENGTH:])
    if seal is None:
        raise TraceError(f"{where} is damaged: it does not end with its checksum. {TRACE_AGAIN}")
    # Text with surrogates cannot be encoded as UTF-8; its checksum only has to differ.
    checksum = sum_of(body.encode("utf-8", "surrogatepass"))
    if checksum != seal[1]:
        raise TraceError(f"{where} is damaged: its checksum is {checksum}, but {seal[1]} was written. {TRACE_AGAIN}")
    return f"{body}\n}}"


def seal_of(text: str) -> str:
    """Return the checksum in a sealed document, without verifying it."""
    return text[-11:-3]


def read_document(path: Path) -> dict[str, Any]:
    """Read a sealed document; return an empty dict if there is none."""
    try:
        document = parse_json(open_document(read_text(path), str(path)), path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged: {error}. {TRACE_AGAIN}") from None
    if not isinstance(document, dict):
        raise TraceError(f"{path} is damaged: it is not a JSON object. {TRACE_AGAIN}")
    return document


def seal_line(line: str) -> str:
    """Add a seal to a JSON object in one line."""
    body = line[:-1]
    return f'{body},"sum":"{sum_of(body.encode())}"}}'


def is_intact(line: str) -> bool:
    """Return whether a line is unchanged since it was sealed."""
    seal = _LINE.fullmatch(line[-_LINE_LENGTH:])
    return seal is not None and seal[1] == sum_of(line[:-_LINE_LENGTH].encode("utf-8", "surrogatepass"))


def strip_seal(line: str) -> str:
    """Return an intact line without its seal."""
    return f"{line[:-_LINE_LENGTH]}}}"


def fingerprint_file(path: Path) -> str:
    """Return a digest of a file's content; empty if the file cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except (OSError, ValueError):  # a name may be too long, or contain a null character
        return ""


def find_changed_file(fingerprints: Mapping[str, str]) -> str | None:
    """Find the first file that has changed."""
    return next((path for path, old in fingerprints.items() if fingerprint_file(Path(path)) != old), None)
