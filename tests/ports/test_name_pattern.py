"""Patterns of maps: words, stars and numbers in names, and globs over sites."""

from __future__ import annotations

import pytest

from ttrace.layouts.ids import Kind, Site
from ttrace.ports.name_pattern import match_name, matches_site, rename


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
