"""Files of maps: those that TTrace brings, and those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ttrace
from ttrace.errors import TTraceError
from ttrace.ports.port_map import PortMap, list_shipped
from ttrace.ports.toml import format_map


@pytest.mark.parametrize("name", list_shipped())
def test_a_shipped_map_is_read_as_it_is_printed(name: str, tmp_path: Path) -> None:
    found = PortMap.load(name)
    (tmp_path / "map.toml").write_text(format_map(found))
    assert PortMap.load(str(tmp_path / "map.toml")) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "maps nothing"),
        ("names = 3", "is no map"),
        ('[names]\na = "b"\n[dims]\nb = "x -> y"', "no order of dims"),
        ('[names]\na = "b"\n[[join]]\nparts = []\nwhole = "b"', "is no map"),
        ('[names]\na = "b"\n[shapes]\na = "b"', "is no map"),
        ('[[join]]\nparts = ["q", "k"]\nwhole = "b"\nrotary = [8]', "a size for each of its 2 parts"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(TTraceError, match=words):
        PortMap.load(str(tmp_path / "map.toml"))


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(TTraceError, match=r"there is no map lama-megatron.*llama-megatron"):
        PortMap.load("lama-megatron")


def test_the_command_lists_and_prints_maps() -> None:
    assert ttrace("map").stdout.split() == list(list_shipped())
    assert ttrace("map", "llama-megatron").stdout == format_map(PortMap.load("llama-megatron"))
    wrong = ttrace("map", "--suggest", "one")
    assert (wrong.returncode, "needs two traces" in wrong.stderr) == (2, True)
