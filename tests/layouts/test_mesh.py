"""A rank sits where its row-major number says, in every factorisation of the mesh."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttrace.errors import LayoutError
from ttrace.layouts.mesh import Mesh

TWO = "pp=2 dp=2 cp=2 tp=2 | pp=2 edp=1 ep=8"


@given(st.lists(st.integers(1, 5), max_size=4))
def test_coordinates_are_row_major(sizes: list[int]) -> None:
    mesh = Mesh.of(**{f"a{i}": size for i, size in enumerate(sizes)})
    ranks = torch.arange(mesh.num_ranks).view(sizes)
    for coord in mesh.coords():
        assert int(ranks[tuple(coord[f"a{i}"] for i in range(len(sizes)))]) == coord.rank


@pytest.mark.parametrize("text", ["", "tp=4", "pp=2 dp=3 tp=4", TWO])
def test_a_mesh_reads_back_as_it_was_written(text: str) -> None:
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(str(Mesh.parse(text))) == Mesh.parse(text)


def test_the_empty_mesh_is_one_rank() -> None:
    assert Mesh().num_ranks == 1
    assert str(Mesh().coord(0)) == "rank 0"
    assert dict(Mesh().coord(0)) == {}


def test_two_factorisations_place_the_same_ranks() -> None:
    mesh = Mesh.parse(TWO)
    assert mesh.num_ranks == 16
    assert mesh.sizes == {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "edp": 1, "ep": 8}
    coord = mesh.coord(13)
    assert dict(coord) == {"pp": 1, "dp": 1, "cp": 0, "tp": 1, "edp": 0, "ep": 5}
    assert str(coord) == "rank 13 (pp1 dp1 cp0 tp1 edp0 ep5)"
    for axes in (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep")):
        assert len({tuple(coord[axis] for axis in axes) for coord in mesh.coords()}) == 16


def test_axes_of_one_factorisation_go_together() -> None:
    mesh = Mesh.parse(TWO)
    mesh.check_one_factorisation(frozenset())
    mesh.check_one_factorisation(frozenset({"pp", "tp"}))
    mesh.check_one_factorisation(frozenset({"pp", "ep"}))
    with pytest.raises(LayoutError, match=r"axes ep, tp cannot be combined: .* has them in different fact"):
        mesh.check_one_factorisation(frozenset({"tp", "ep"}))
    with pytest.raises(LayoutError, match=r"has no axis sp. Correct the name, or pass the job's axes"):
        mesh.check_one_factorisation(frozenset({"tp", "sp"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is not axis=size, for instance tp=4"),
        ("tp=x", "'tp=x' is not axis=size, for instance tp=4"),
        ("tp=-2", "'tp=-2' is not axis=size"),
        ("tp=²", "'tp=²' is not axis=size"),
        pytest.param(f"tp={'9' * 5000}", "' is not axis=size", id="huge"),
        (
            "tp=0",
            "tp=0 is not a valid axis. An axis is an identifier used once, other than 'mb', with a size of at least 1",
        ),
        ("mb=2", "mb=2 is not a valid axis"),
        ("tp=2 tp=2", "tp=2 is not a valid axis"),
        ("1p=2", "1p=2 is not a valid axis"),
        ("tp=2 | ep=3", "the factorisations have [2, 3] ranks; they must have the same number"),
        ("pp=2 tp=3 | ep=3 pp=2", "axis pp has a different size or stride in two factorisations. Rename it"),
    ],
)
def test_a_wrong_mesh_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Mesh.parse(text)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_named(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"mesh tp=4 has ranks 0 to 3, not {rank}"):
        Mesh.of(tp=4).coord(rank)
