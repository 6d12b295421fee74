"""This module knows plain PyTorch: ordinary modules, DTensors, and hand-written parallelism on a declared mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ttrace.adapters import dtensor
from ttrace.errors import CaptureError
from ttrace.layouts.placed import Placed
from ttrace.tensors.mesh import Coord, Mesh

MeshLike = Mesh | DeviceMesh | Mapping[str, int] | str


class Native:
    """Plain modules and DTensors. The mesh is the declared one, else the DTensors', else one axis of all ranks."""

    def __init__(self, model: nn.Module, mesh: MeshLike | None = None) -> None:
        self.rank, num_ranks = _rank_and_world()
        self.mesh = _declared(mesh) if mesh is not None else _found(model, num_ranks)
        if self.mesh.num_ranks != num_ranks:
            raise CaptureError(
                f"mesh {str(self.mesh)!r} has {self.mesh.num_ranks} ranks, but {num_ranks} run. Give attach(mesh=...) "
                "all axes of the job, slowest first; a single process needs none."
            )
        self.coord: Coord = self.mesh.coord(self.rank)

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        return dtensor.placed(tensor) if isinstance(tensor, DTensor) else None

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        local = dtensor.local_values(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            arrived: torch.Tensor = local.wait()
            return arrived
        return local


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CaptureError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group is initialised. "
            "Call ttrace.attach after torch.distributed.init_process_group."
        )
    return 0, 1


def _declared(mesh: MeshLike) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return dtensor.mesh_of(mesh)
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    return Mesh.of(**mesh)


def _found(model: nn.Module, num_ranks: int) -> Mesh:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return dtensor.mesh_of(parameter.device_mesh)
    return Mesh.of(ranks=num_ranks) if num_ranks > 1 else Mesh()
