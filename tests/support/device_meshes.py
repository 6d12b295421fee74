"""Device meshes without a process group."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh

from ttrace.tensors.region import Shape


def device_mesh(shape: Shape, rank: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
