"""Types of spmd_types state a tensor's layout and its gradient's; what they leave open is not claimed."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttrace.adapters.native.spmd_types import read_placement
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource, Placement
from ttrace.layouts.splits import NO_SPLITS, Split

MESH = Mesh.of(dp=2, cp=2, tp=2)
HERE = {"dp": 1, "cp": 1, "tp": 0}


class Type(Enum):
    """As spmd_types has it."""

    R = "R"
    I = "I"  # noqa: E741
    V = "V"
    P = "P"


class Axis:
    """An axis, known by the sizes and strides of its ranks."""

    def __init__(self, *sizes_and_strides: tuple[int, int]) -> None:
        self.layout = SimpleNamespace(sizes_and_strides=sizes_and_strides)


DP, CP, TP, DP_CP = Axis((2, 4)), Axis((2, 2)), Axis((2, 1)), Axis((4, 2))


def read(types: dict[Axis, Type], *spec: Any, shape: tuple[int, ...] = (2, 4), **options: Any) -> Placement | None:
    tensor = torch.zeros(shape)
    tensor._local_type = types  # type: ignore[attr-defined]
    tensor._partition_spec = spec or None  # type: ignore[attr-defined]
    return read_placement(tensor, MESH, HERE, **options)


def test_a_tensor_without_types_states_nothing() -> None:
    assert read_placement(torch.zeros(2), MESH, HERE) is None


def test_an_axis_that_cuts_a_dim_gives_the_region() -> None:
    found = read({TP: Type.R, CP: Type.V}, None, CP)
    assert found is not None
    assert found.region.shape == (2, 8)
    assert found.region.dims == (((0, 2),), ((4, 8),))
    assert (found.pending, found.layout, found.source) == ((), "d0 d1/cp", LayoutSource.SPMD_TYPES)


def test_what_is_partial_is_still_to_be_summed() -> None:
    found = read({TP: Type.P}, None, None)
    assert found is not None
    assert (found.pending, found.layout) == (("tp",), "d0 d1 +tp")


@pytest.mark.parametrize(("kind", "pending"), [(Type.R, ("tp",)), (Type.I, ()), (Type.P, ())])
def test_the_gradient_of_what_is_replicated_is_still_to_be_summed(kind: Type, pending: tuple[str, ...]) -> None:
    found = read({TP: kind}, of_gradient=True)
    assert found is not None
    assert found.pending == pending
    assert found.region.shape == (2, 4)


def test_what_varies_without_a_dim_is_not_claimed() -> None:
    assert read({TP: Type.V}) is None
    assert read({TP: Type.V, CP: Type.V}, None, CP) is None


def test_an_axis_that_the_mesh_does_not_have_is_not_claimed() -> None:
    assert read({Axis((8, 3)): Type.R}) is None
    assert read({TP: Type.R}, None, Axis((8, 3))) is None


def test_several_axes_of_a_dim_cut_it_one_after_the_other() -> None:
    found = read({TP: Type.V, CP: Type.V}, None, (CP, TP))
    assert found is not None
    assert found.region.dims[1] == ((8, 12),)
    joined = read({DP_CP: Type.V}, None, DP_CP)
    assert joined is not None
    assert (joined.layout, joined.region.dims[1]) == ("d0 d1/dp/cp", ((12, 16),))


def test_ranks_with_microbatches_of_their_own_hold_whole_tensors() -> None:
    found = read({DP: Type.V, CP: Type.V, TP: Type.P}, DP, CP, apart=frozenset({"dp"}))
    assert found is not None
    assert (found.region.shape, found.layout) == ((2, 8), "d0 d1/cp +tp")
    assert read({DP: Type.V}, apart=frozenset({"dp"})) is not None
    loss = read({DP: Type.P}, shape=(), apart=frozenset({"dp"}))
    assert loss is not None
    assert loss.pending == ()


def test_the_order_in_which_a_sequence_is_cut_is_that_of_the_framework() -> None:
    found = read({CP: Type.V}, None, CP, splits={"cp": Split("zigzag")})
    block = read({CP: Type.V}, None, CP, splits=NO_SPLITS)
    assert found is not None
    assert block is not None
    assert (found.region.dims[1], block.region.dims[1]) == (((2, 6),), ((4, 8),))
