"""Seals: one changed bit of a document or a line is noticed, wherever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttrace.errors import TraceError
from ttrace.trace.seal import is_intact, open_document, read_document, seal_document, seal_line, strip_seal

DOCUMENT = {"name": "größe", "count": 3, "list": ["a", "\ud800 no character"]}


def flipped(data: bytes) -> list[bytes]:
    """The data with each bit changed in turn."""
    found = []
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            found.append(bytes(changed))
    return found


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_a_sealed_document_is_json_and_opens_as_it_was(indent: int | None) -> None:
    text = seal_document(json.dumps(DOCUMENT, indent=indent))
    assert json.loads(text) == {**DOCUMENT, "sum": text[-11:-3]}
    assert json.loads(open_document(text, "here.json")) == DOCUMENT


def test_a_document_of_which_one_bit_changed_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    for data in flipped(seal_document(json.dumps(DOCUMENT, indent=1)).encode()):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=r"here\.json is damaged"):
            read_document(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"a": 1}', "[" * 100_000, seal_document("[1}")])
def test_what_was_not_sealed_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "here.json").write_text(text)
    with pytest.raises(TraceError, match=r"here\.json is damaged"):
        read_document(tmp_path / "here.json")


def test_a_document_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert read_document(tmp_path / "nothing.json") == {}


def test_a_line_of_which_one_bit_changed_is_not_intact() -> None:
    line = json.dumps(DOCUMENT)
    sealed = seal_line(line)
    assert is_intact(sealed)
    assert strip_seal(sealed) == line
    assert json.loads(sealed) == {**DOCUMENT, "sum": sealed[-10:-2]}
    for data in flipped(sealed.encode()):
        assert not is_intact(data.decode(errors="replace"))
    assert not is_intact(line)
    assert not is_intact("")
