"""Map files: those that TTrace ships with, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ttrace
from ttrace.errors import TTraceError
from ttrace.layouts.ids import Kind, Site
from ttrace.ports.port_map import PortMap, format_map, list_shipped, match_name, matches_site, rename


@pytest.mark.parametrize("name", list_shipped())
def test_a_shipped_map_is_read_as_it_is_printed(name: str, tmp_path: Path) -> None:
    found = PortMap.load(name)
    (tmp_path / "map.toml").write_text(format_map(found))
    assert PortMap.load(str(tmp_path / "map.toml")) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "maps nothing"),
        ("names = 3", "cannot read the map file"),
        ('[names]\na = "b"\n[dims]\nb = "x -> y"', "not an order of dims"),
        ('[names]\na = "b"\n[[join]]\nparts = []\nwhole = "b"', "cannot read the map file"),
        ('[names]\na = "b"\n[shapes]\na = "b"', "cannot read the map file"),
        ('[[join]]\nparts = ["q", "k"]\nwhole = "b"\nrotary = [8]', "a size for each of its 2 parts"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(TTraceError, match=words):
        PortMap.load(str(tmp_path / "map.toml"))


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(TTraceError, match=r"cannot read the map file lama-megatron: .* or one of .*llama-megatron"):
        PortMap.load("lama-megatron")


@pytest.mark.usefixtures("warm_commands")
def test_the_command_lists_and_prints_maps() -> None:
    assert ttrace("map").stdout.split() == list(list_shipped())
    assert ttrace("map", "llama-megatron").stdout == format_map(PortMap.load("llama-megatron"))
    wrong = ttrace("map", "--suggest", "one")
    assert (wrong.returncode, "needs two traces" in wrong.stderr) == (2, True)


# Patterns of maps: words, stars and numbers in names, and globs over sites.


def test_stars_are_words_and_what_follows_is_kept() -> None:
    match = match_name("model.layers.*.mlp", "model.layers.7.mlp.up.weight")
    assert match is not None
    assert (match.stars, match.rest) == (("7",), ".up.weight")
    assert match.fill("decoder.layers.*.ffn") == "decoder.layers.7.ffn.up.weight"


def test_a_number_is_told_apart_from_a_name() -> None:
    match = match_name("experts.#.fc1", "experts.12.fc1.weight")
    assert match is not None
    assert match.number == 12
    assert match_name("experts.#.fc1", "experts.shared.fc1.weight") is None


def test_the_longest_pattern_renames() -> None:
    names = {"model": "decoder", "model.layers.*.mlp": "decoder.layers.*.ffn", "model.norm": "decoder.last"}
    assert rename(names, "model.layers.3.mlp.up.weight") == "decoder.layers.3.ffn.up.weight"
    assert rename(names, "model.norm.weight") == "decoder.last.weight"
    assert rename(names, "model") == "decoder"
    assert rename(names, "head") is None


@pytest.mark.parametrize(
    ("pattern", "site", "fits"),
    [
        ("**.act_fn", Site("a.b.act_fn", Kind.OUTPUT), True),
        ("**.act_fn", Site("act_fn", Kind.GRAD_INPUT), True),
        ("**.act_fn", Site("a.act_fn.b", Kind.OUTPUT), False),
        ("**.*rotary*.**", Site("model.rotary_emb.inv_freq", Kind.BUFFER), True),
        ("layers.*/input", Site("layers.0", Kind.INPUT, "mask"), True),
        ("layers.*/input", Site("layers.0.mlp", Kind.INPUT), False),
        ("layers.*/input.", Site("layers.0", Kind.INPUT), True),
        ("layers.*/input.", Site("layers.0", Kind.INPUT, "mask"), False),
        ("./input.?*", Site(".", Kind.INPUT), False),
        ("./input.?*", Site(".", Kind.INPUT, "labels"), True),
        ("**.router/decision.[01]", Site("a.router", Kind.DECISION, "1"), True),
        ("**.router/decision.[01]", Site("a.router", Kind.DECISION, "2"), False),
        ("**.experts.**/*put*", Site("a.experts.0.fc1", Kind.GRAD_INPUT), True),
        ("**.experts.**/*put*", Site("a.experts.weight", Kind.OPTIM, "exp_avg"), False),
    ],
)
def test_patterns_over_sites(pattern: str, site: Site, fits: bool) -> None:
    assert matches_site(pattern, site) is fits
