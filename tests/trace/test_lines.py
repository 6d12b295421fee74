"""Lines read quickly: nothing that they say is read otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.record_strategies import GOOD, HOSTILE, anything, records
from ttrace.errors import TraceError
from ttrace.trace.format import Record, SketchInfo
from ttrace.trace.lines import decode, decode_quickly, encode


def outcome(function: Any, line: str) -> Record | str:
    try:
        found: Record = function(line)
    except TraceError as error:
        return str(error)
    return found


@given(record=records(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_line_is_read_as_decode_reads_it_however_it_is_damaged(record: Record, data: st.DataObject) -> None:
    line = encode(record)
    assert decode_quickly(line) == record
    at = data.draw(st.integers(0, len(line) - 1))
    entry = json.loads(line)
    entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(anything)
    scribbled = line[:at] + data.draw(st.characters(exclude_categories=["Cs"])) + line[at + 1 :]
    for damaged in (line[:at], scribbled, json.dumps(entry, separators=(",", ":"))):
        assert repr(outcome(decode_quickly, damaged)) == repr(outcome(decode, damaged))


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_line_is_refused_in_the_same_words(change: dict[str, Any]) -> None:
    line = json.dumps({**GOOD, **change}, separators=(",", ":"))
    decode_quickly(json.dumps(GOOD, separators=(",", ":")))
    assert isinstance(outcome(decode_quickly, line), str)
    assert outcome(decode_quickly, line) == outcome(decode, line)


@pytest.mark.parametrize(
    "changed",
    [
        ('"order":0', '"order":00'),
        pytest.param(('"id":"0/', f'"id":"{"9" * 5000}/'), id="huge"),
        ('"order":0', '"order":٣'),
        ('"order":0', '"order":-0'),
        ('"id":"0/', '"id":"\x01/'),
        ('"mb":0', '"mb":0,"mb":3'),
        ("}", ',"order":5}'),
        ("}", ',"sketch":[64,0.5],"sketch":[0,1.5]}'),
        ("}", ',"sketch":[0,0.5]}'),
        ("}", ',"sketch":[64,1e999]}'),
        ("}", ',"sketch":[63,0.5]}'),
    ],
    ids=str,
)
def test_spellings_that_only_look_alike_are_not_mixed_up(changed: tuple[str, str]) -> None:
    good = json.dumps(
        {key: value for key, value in GOOD.items() if key != "region"} | {"region": None}, separators=(",", ":")
    )
    start, end = good.rsplit(changed[0], 1) if changed[0] == "}" else good.split(changed[0], 1)
    line = start + changed[1] + end
    assert repr(outcome(decode_quickly, line)) == repr(outcome(decode, line))


def test_sketches_are_read() -> None:
    record = decode(json.dumps({**GOOD, "at": [0, 1000, 1512], "sketch": [64, -1.5e-07]}, separators=(",", ":")))
    assert record.sketch == SketchInfo(64, -1.5e-07)
    assert decode_quickly(encode(record)) == record
