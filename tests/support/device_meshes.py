"""Device meshes without a process group."""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from ttrace.compat.torch import RELEASE
from ttrace.layouts.region import Shape


def device_mesh(shape: Shape, rank: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return mesh_of(torch.arange(math.prod(shape)).view(shape), rank, names)


def mesh_of(ranks: torch.Tensor, rank: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Make the mesh of these ranks as one of them has it."""
    if RELEASE >= (2, 10):
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    with mock.patch("torch.distributed.device_mesh.get_rank", return_value=rank):
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False)
