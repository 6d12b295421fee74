"""The mesh of a model is found where its parameters lie; all without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.support.device_meshes import device_mesh, mesh_of
from ttrace.adapters.native.adapter import find_mesh, list_device_meshes
from ttrace.errors import CaptureError
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.region import Shape


def make_model_on(*meshes: tuple[Shape, tuple[str, ...]]) -> nn.Module:
    """Make a model with one parameter on each of these meshes."""
    model = nn.Module()
    for i, (shape, names) in enumerate(meshes):
        placements = [Shard(0)] * len(shape)
        local = DTensor.from_local(torch.zeros(2, 2), device_mesh(shape, 0, names), placements, run_check=False)
        model.register_parameter(f"p{i}", nn.Parameter(local))
    return model


def find(model: nn.Module) -> Mesh:
    return find_mesh([model], list_device_meshes([model]), 8)


def test_meshes_of_the_same_ranks_are_factorisations() -> None:
    model = make_model_on(((4, 2), ("fsdp", "tp")), ((2, 4), ("efsdp", "ep")), ((4, 2), ("fsdp", "tp")))
    assert find(model) == Mesh.parse("fsdp=4 tp=2 | efsdp=2 ep=4")


def test_a_mesh_of_fewer_ranks_is_left_out() -> None:
    assert find(make_model_on(((2,), ("tp",)), ((4, 2), ("dp", "tp")))) == Mesh.of(dp=4, tp=2)


def test_meshes_that_name_an_axis_differently_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"device meshes that do not go together: .*axis tp lies differently"):
        find(make_model_on(((4, 2), ("dp", "tp")), ((2, 4), ("cp", "tp"))))


@pytest.mark.parametrize(
    ("ranks", "names", "expected"),
    [
        ([[0, 1], [2, 3], [4, 5], [6, 7]], ("fsdp", "tp"), "fsdp=4 tp=2"),
        ([[4, 5], [6, 7]], ("fsdp", "tp"), "pp=2 fsdp=2 tp=2"),
        ([[[0]], [[2]], [[4]], [[6]]], ("fsdp", "one", "other"), "fsdp=4 pp=2 one=1 other=1"),
    ],
)
def test_axes_of_an_unflattened_mesh_keep_their_names(
    monkeypatch: pytest.MonkeyPatch, ranks: list[object], names: tuple[str, ...], expected: str
) -> None:
    """torchtitan cuts one mesh of all ranks in several ways; the root has an axis called world."""
    root = device_mesh((8,), 0, ("world",))
    monkeypatch.setattr("ttrace.adapters.native.adapter.find_root_mesh", lambda _: root)
    inner = mesh_of(torch.tensor(ranks), 0, names)
    assert find_mesh([], [inner], 8) == Mesh.parse(expected)
