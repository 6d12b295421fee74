"""The bench proves what is true, and finds what is not: lost elements, and tensors of nobody or of two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest

from bench.layout import RULES, Division, Holdings, Model, holdings, tensors
from ttrace.layouts.ids import Site
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import TILING, Region, measure_coverage
from ttrace.layouts.rules import Rules
from ttrace.layouts.splits import split

MODEL = Model(
    num_layers=3,
    num_dense=1,
    num_experts=6,
    num_chosen=2,
    vocab=100,
    hidden=24,
    num_heads=4,
    q_rank=6,
    kv_rank=5,
    rope=2,
    head=4,
    ffn=28,
    expert_ffn=10,
    seq=13,
    batch=3,
)
MESH = Mesh.parse("pp=2 dp=2 cp=2 tp=2 | pp=2 edp=2 ep=4 etp=1")


def divided(rules: Mapping[str, str] | None = None, held: Holdings | None = None) -> Division:
    stated = Rules.of({**RULES, **(rules or {})})
    return Division(MESH, stated, {**holdings(MODEL, MESH), **(held or {})}, list(tensors(MODEL)))


@split
def forgetful(size: int, rank: int, world: int) -> Ranges:
    """Blocks of which the last one ends an element early."""
    step = -(-size // world)
    return ((min(rank * step, size), min((rank + 1) * step, size - 1)),)


def test_the_model_is_proved() -> None:
    assert divided().prove() == []


def test_the_proof_is_what_looking_at_every_rank_finds() -> None:
    """Joined over all ranks, the lists of regions tile every tensor, and no tensor is missing."""
    division = divided()
    held: dict[Site, list[Region]] = defaultdict(list)
    for coord in MESH.coords():
        for site, region in division.regions(coord).items():
            held[site].append(region)
    assert held.keys() == {tensor.site for tensor in division.tensors}
    assert {site for site, regions in held.items() if measure_coverage(regions) != TILING} == set()


def test_ranks_hold_only_what_they_own() -> None:
    """Stage 0 has the embedding and layer 0; the last rank has two of the six experts of layers 1 and 2."""
    division = divided()
    first, last = ({site.name for site in division.regions(MESH.coord(rank))} for rank in (0, 15))
    assert "embed.weight" in first - last
    assert "lm_head.weight" in last - first
    assert not any(".experts." in name for name in first)
    assert {name for name in last if name.endswith(".gate.weight")} == {
        f"layers.{layer}.moe.experts.{expert}.gate.weight" for layer in (1, 2) for expert in (4, 5)
    }


def test_a_layout_that_loses_an_element_is_caught() -> None:
    faults = divided({"*.attn.o.weight/param": "hidden head/tp:forgetful"}).prove()
    assert len(faults) == MODEL.num_layers
    assert faults[0] == (
        "layers.0.attn.o.weight/param: hidden head/tp:forgetful loses 24 elements (first (0, 15)) "
        "and holds 0 twice (first None)"
    )


def test_a_tensor_of_nobody_is_caught() -> None:
    faults = divided(held={"pp": [range(2), range(2, 4)]}).prove()
    assert "lm_head.weight/param: 0 indices of axis pp hold it" in faults
    assert all(fault.startswith(("norm", "lm_head")) for fault in faults)


def test_a_tensor_of_a_rank_that_does_not_exist_is_caught() -> None:
    faults = divided(held={"ep": [(0, 1), (2,), (3,), (4,), (5,)]}).prove()
    assert faults
    assert all(".experts.5" in fault and "0 indices of axis ep" in fault for fault in faults)


def test_a_tensor_of_two_owners_is_caught() -> None:
    faults = divided(held={"ep": [(0, 1), (1, 2, 3), (4,), (5,)]}).prove()
    assert faults
    assert all(".experts.1" in fault and "2 indices of axis ep" in fault for fault in faults)


def test_a_tensor_without_a_layout_is_caught() -> None:
    division = divided()
    division.layouts[0] = None
    assert division.prove() == ["embed.weight/param: no rule gives it a layout"]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("ffn/tp hidden", "axes ep, pp, tp cannot be combined"),
        ("ffn/ep hidden", "ffn/ep hidden cuts it along ep, which already tells its owner"),
        ("ffn", "layout 'ffn' has 1 dims, the tensor has 2"),
        ("ffn/edp:fused(3) hidden", "fused(3): 10 indices do not divide into these parts"),
    ],
)
def test_a_layout_that_does_not_fit_the_tensor_is_caught(layout: str, reason: str) -> None:
    faults = divided({"*.experts.*.up.weight/param": layout}).prove()
    assert len(faults) == 2 * MODEL.num_experts
    assert reason in faults[0]
