"""Adapter for plain PyTorch: ordinary modules, DTensor, FSDP2, DDP, pipelining, and a declared mesh.

The objects state what they know themselves: DTensors their placements, FSDP2 and DDP the axes along which ranks have
data of their own and the number that they divide gradients by, pipeline stages their microbatches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ttrace.adapters.adapter import Adapter, Optimizer, check_mesh, find_rank_and_world, make_anonymous_mesh
from ttrace.adapters.events import FrameworkEvents
from ttrace.adapters.native import layouts, spmd_types
from ttrace.compat.distributed import find_root_mesh, list_fsdp_groups, read_divide_factor, wait_for
from ttrace.compat.torch import unwrap_compiled
from ttrace.errors import CaptureError, LayoutError
from ttrace.layouts.ids import ROOT, Site, encode_name
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import Placement
from ttrace.layouts.splits import NO_SPLITS, Split
from ttrace.reference.shared_modules import read_divided

MeshLike = Mesh | DeviceMesh | Mapping[str, int] | str
DATA_AXIS, PIPELINE_AXIS, CONTEXT_AXIS = "dp", "pp", "cp"
"""The names of the axes of data, pipeline and context parallelism, unless something else states them."""


class Native(Adapter):
    """Adapter for plain modules and DTensors.

    The mesh is the declared one. Without one it is that of the DTensors, and without DTensors one axis of all ranks.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Optimizer | None = None,  # noqa: ARG002
        *,
        mesh: MeshLike | None = None,
    ) -> None:
        self.rank, num_ranks = find_rank_and_world()
        # DDP may be inside of a module that torch.compile made.
        self.chunks = [unwrap_compiled(chunk) for chunk in chunks]
        if mesh is not None:
            self.mesh = read_mesh(mesh)
        else:
            self.mesh = find_mesh(self.chunks, self.find_device_meshes(), num_ranks)
        check_mesh(self.mesh, num_ranks)
        self.coord = self.mesh.coord(self.rank)

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:  # noqa: ARG003
        """Return True: every model is made of modules of torch."""
        return True

    def find_device_meshes(self) -> Iterable[DeviceMesh]:
        """Find the meshes that this rank's parameters lie on."""
        return list_device_meshes(self.chunks)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        meshes = _list_fsdp_meshes(self.chunks)
        if meshes:
            # Experts may be sharded over fewer ranks than those that have data of their own.
            widest = set(layouts.read_axis_names(max(meshes, key=lambda mesh: mesh.size()))) - {CONTEXT_AXIS}
            return tuple(axis for axis in self.mesh.sizes if axis in widest)
        return (DATA_AXIS,) if DATA_AXIS in self.mesh.sizes else ()

    @cached_property
    def distributing_axes(self) -> frozenset[str]:
        sharding = {axis for mesh in _list_fsdp_meshes(self.chunks) for axis in layouts.read_axis_names(mesh)} - {
            CONTEXT_AXIS
        }
        return frozenset(self.data_axes) | ((sharding | {PIPELINE_AXIS}) & set(self.mesh.sizes))

    @cached_property
    def reduced_axes(self) -> frozenset[str]:
        """The axes of DDP's group, and the axis along which FSDP2's shards are replicated."""
        wrapped = list_ddp(self.chunks)
        if wrapped:
            groups = [dist.get_process_group_ranks(chunk.process_group) for chunk in wrapped]
            return frozenset.intersection(*(_find_spanned_axes(self.mesh, ranks) for ranks in groups))
        replicated = {layouts.read_axis_names(mesh)[0] for mesh in _list_fsdp_meshes(self.chunks) if mesh.ndim == 2}
        return frozenset(replicated & set(self.mesh.sizes))

    @cached_property
    def divided(self) -> frozenset[str]:
        return frozenset({ROOT, *(encode_name(path) for chunk in self.chunks for path in read_divided(chunk))})

    @property
    def grad_factor(self) -> float:
        """The factor of DDP and FSDP2, which divide by the number of ranks that they reduce over, or as FSDP2 is set.

        For hand-written reductions the script must state it itself.
        """
        for ddp in list_ddp(self.chunks):
            return 1.0 / dist.get_world_size(ddp.process_group)
        groups = list(list_fsdp_groups(self.chunks))
        # From the groups that reduce over most ranks: experts may be sharded over fewer, with a factor that makes up
        # for that.
        widest = max((group.mesh_info.mesh.size() for group in groups), default=1)
        divisors: Counter[float] = Counter()
        for group in groups:
            if group.mesh_info.mesh.size() == widest:
                divisors[read_divide_factor(group) or float(widest)] += len(group.fsdp_params)
        return 1.0 / divisors.most_common(1)[0][0] if divisors else 1.0

    def attach(self, events: FrameworkEvents) -> None:
        if self.mesh.num_ranks > 1:
            from ttrace.adapters.native.schedule import watch_stage

            for chunk in self.chunks:
                watch_stage(chunk, events, self.patches)

    def read_placement(
        self,
        tensor: torch.Tensor,
        apart: Collection[str] = (),
        splits: Mapping[str, Split] = NO_SPLITS,
        *,
        of_gradient: bool = False,
    ) -> Placement | None:
        if isinstance(tensor, DTensor):  # its gradient is one, too
            return None if of_gradient else layouts.read_placement(tensor, apart)
        return spmd_types.read_placement(tensor, self.mesh, self.coord, apart, splits, of_gradient=of_gradient)

    def to_full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def to_local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:  # noqa: ARG002
        local = layouts.read_local_values(tensor) if isinstance(tensor, DTensor) else tensor
        return wait_for(local)

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return layouts.with_local(tensor, local) if isinstance(tensor, DTensor) else local


def read_mesh(mesh: MeshLike) -> Mesh:
    """Read a mesh in any of the forms in which scripts may declare it."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return layouts.convert_mesh(mesh)
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    return Mesh.of(**mesh)


def list_device_meshes(chunks: Sequence[nn.Module]) -> list[DeviceMesh]:
    """List the mesh of every parameter that is a DTensor."""
    return [p.device_mesh for chunk in chunks for p in chunk.parameters() if isinstance(p, DTensor)]


def list_ddp(chunks: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """List the modules of DDP, if they hold everything that is trained; otherwise none."""
    found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel)]
    reduced = {id(parameter) for module in found for parameter in module.parameters()}
    trained = (parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad)
    return found if all(id(parameter) in reduced for parameter in trained) else []


def find_mesh(chunks: Sequence[nn.Module], device_meshes: Iterable[DeviceMesh], num_ranks: int) -> Mesh:
    """Join the meshes that parameters lie on, each as a factorisation; with DDP, all ranks lie along dp."""
    roots = {mesh: find_root_mesh(mesh) for mesh in dict.fromkeys(device_meshes)}
    if roots:
        widest = max(root.size() for root in roots.values())
        parts = [
            part
            for mesh, root in roots.items()
            if root.size() == widest
            for part in _complete_mesh(mesh, root).factorisations
        ]
        return _join_factorisations(tuple(dict.fromkeys(parts)))
    if num_ranks > 1 and list_ddp(chunks):
        return Mesh.of(**{DATA_AXIS: num_ranks})
    return make_anonymous_mesh(num_ranks)


def _complete_mesh(mesh: DeviceMesh, root: DeviceMesh) -> Mesh:
    """Return the mesh that this one was cut from, or the root with the names of this one if it was unflattened.

    Of an unflattened mesh the axes outside of it have no names here. They are those of pipelining.
    """
    if set(layouts.read_axis_names(mesh)) <= set(layouts.read_axis_names(root)):
        return layouts.convert_mesh(root)
    axes: list[tuple[str, int]] = []
    ranks, num_ranks = mesh.mesh, 1
    for dim in reversed(range(mesh.ndim)):
        size = mesh.size(dim)
        if size > 1:
            step = int(ranks.select(dim, 1).flatten()[0] - ranks.flatten()[0])
            if step != num_ranks:
                axes.append((PIPELINE_AXIS, step // num_ranks))
            num_ranks = step * size
        axes.append((layouts.read_axis_names(mesh)[dim], size))
    if num_ranks != root.size():
        axes.append((PIPELINE_AXIS, root.size() // num_ranks))
    return Mesh((tuple(reversed(axes)),))


def _find_spanned_axes(mesh: Mesh, ranks: Sequence[int]) -> frozenset[str]:
    """Find the axes that a group of ranks spans; none if the group is no part of the mesh."""
    coords = [mesh.coord(rank) for rank in ranks]
    for part in mesh.factorisations:
        spanned = {axis: size for axis, size in part if len({coord[axis] for coord in coords}) > 1}
        if math.prod(spanned.values()) == len(ranks):
            return frozenset(spanned)
    return frozenset()


def _join_factorisations(factorisations: tuple[tuple[tuple[str, int], ...], ...]) -> Mesh:
    try:
        return Mesh(factorisations)
    except LayoutError as error:
        raise CaptureError(f"the parameters lie on device meshes that do not go together: {error}") from None


def _list_fsdp_meshes(chunks: Sequence[nn.Module]) -> list[DeviceMesh]:
    """List the meshes over which FSDP2 shards and reduces, if it wraps anything."""
    return list(dict.fromkeys(group.mesh_info.mesh for group in list_fsdp_groups(chunks)))
