"""A ledger is read as it was written, and refused if it was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ledgers import make_collective, write_ledgers
from ttrace.errors import TraceError
from ttrace.layouts.ids import Phase
from ttrace.layouts.mesh import Mesh
from ttrace.trace.collectives import COLLECTIVES, Collective, Group, encode_collective
from ttrace.trace.reader import Trace

ENTRIES = [
    make_collective(),
    make_collective("send", 'a"b.ü', Phase.BACKWARD, peer=3, source="/tmp/ö \n.py:3", issuer="pipelining"),
    make_collective("barrier", phase=Phase.OTHER, shape=(), num_bytes=0, is_async=True),
    Collective.model_validate({**make_collective().model_dump(), "group": Group(ranks=(0, 3))}),
]


def test_lines_are_what_pydantic_would_write() -> None:
    for one in ENTRIES:
        assert json.loads(encode_collective(one)) == json.loads(one.model_dump_json())


def test_a_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = write_ledgers(tmp_path, "tp=2", [ENTRIES, []])
    assert [list(rank.collectives) for rank in trace.ranks] == [ENTRIES, []]


def test_a_rank_that_did_not_finish_has_the_lines_so_far(tmp_path: Path) -> None:
    folder = write_ledgers(tmp_path, "", [ENTRIES]).ranks[0].folder
    (folder / "end.json").unlink()
    path = Path(str(folder / COLLECTIVES))
    path.write_bytes(path.read_bytes() + b'{"order":4,"st')
    assert list(Trace(tmp_path).ranks[0].collectives) == ENTRIES


def change_letter(data: bytes) -> bytes:
    return data.replace(b"all_reduce", b"all_gather", 1)


def drop_line(data: bytes) -> bytes:
    return data.split(b"\n", 1)[1]


def double_line(data: bytes) -> bytes:
    return data.split(b"\n", 1)[0] + b"\n" + data


@pytest.mark.parametrize(
    ("change", "is_finished"),
    # Without an end nobody knows how many lines there were.
    [(change_letter, True), (drop_line, True), (double_line, True), (change_letter, False)],
)
def test_a_changed_ledger_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], *, is_finished: bool) -> None:
    folder = write_ledgers(tmp_path, "", [ENTRIES]).ranks[0].folder
    if not is_finished:
        (folder / "end.json").unlink()
    path = Path(str(folder / COLLECTIVES))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TraceError, match="is damaged"):
        _ = Trace(tmp_path).ranks[0].collectives


def test_a_removed_ledger_is_missed(tmp_path: Path) -> None:
    folder = write_ledgers(tmp_path, "", [ENTRIES]).ranks[0].folder
    (folder / COLLECTIVES).unlink()
    with pytest.raises(TraceError, match="it is not there"):
        _ = Trace(tmp_path).ranks[0].collectives


def test_a_group_lists_its_ranks() -> None:
    mesh = Mesh.parse("pp=2 dp=2 tp=2")
    assert Group(axes=("tp",)).list_ranks(mesh, 5) == (4, 5)
    assert Group(axes=("pp", "tp")).list_ranks(mesh, 2) == (2, 3, 6, 7)
    assert Group(ranks=(1, 4)).list_ranks(mesh, 1) == (1, 4)
    with pytest.raises(TraceError, match="runs over ep, but the mesh is 'pp=2 dp=2 tp=2'"):
        Group(axes=("ep",)).list_ranks(mesh, 1)
