"""The mesh of a model is found where its parameters lie; all without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.support.device_meshes import device_mesh
from ttrace.adapters.native.adapter import find_mesh, list_device_meshes
from ttrace.errors import CaptureError
from ttrace.tensors.mesh import Mesh
from ttrace.tensors.region import Shape


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
