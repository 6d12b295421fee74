"""Adapter for plain PyTorch: ordinary modules, DTensor, FSDP2, DDP, pipelining, and a declared mesh.

The objects themselves state what is needed: DTensors their placements, FSDP2 and DDP the axes along which ranks have
different data and the number that gradients are divided by, pipeline stages their microbatches. `find_cut` finds how
torch's `context_parallel` splits sequences.
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

from ttrace.adapters.adapter import (
    Adapter,
    FrameworkEvents,
    Optimizer,
    check_mesh,
    find_rank_and_world,
    make_anonymous_mesh,
)
from ttrace.adapters.native import layouts, spmd_types
from ttrace.adapters.native.layouts import read_axis_names
from ttrace.compat.distributed import find_root_mesh, list_fsdp_groups, read_divide_factor, wait_for
from ttrace.compat.torch import unwrap_compiled
from ttrace.errors import CaptureError, LayoutError
from ttrace.large_references.streamed import read_divided
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import ROOT, Site, encode_name
from ttrace.layouts.layout import Cut
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import Placement
from ttrace.layouts.splits import BLOCK, NO_SPLITS, Split

MeshLike = Mesh | DeviceMesh | Mapping[str, int] | str
DATA_AXIS, PIPELINE_AXIS, CONTEXT_AXIS = "dp", "pp", "cp"
"""The names of the axes of data, pipeline and context parallelism, unless the script declares other names."""
_KNOWN_SPLITS = (BLOCK, Split("zigzag"))


class Native(Adapter):
    """Adapter for plain modules and DTensors.

    The mesh is the declared one, or that of the DTensors, or one axis of all ranks.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Optimizer | None = None,  # noqa: ARG002
        *,
        mesh: MeshLike | None = None,
    ) -> None:
        self.rank, num_ranks = find_rank_and_world()
        # DDP may be inside of a compiled module.
        self.chunks = [unwrap_compiled(chunk) for chunk in chunks]
        if mesh is not None:
            self.mesh = read_mesh(mesh)
        else:
            self.mesh = find_mesh(self.chunks, self.find_device_meshes(), num_ranks)
        check_mesh(self.mesh, num_ranks)
        self.coord = self.mesh.coord(self.rank)

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:  # noqa: ARG003
        """Return True: every model consists of torch modules."""
        return True

    def find_device_meshes(self) -> Iterable[DeviceMesh]:
        """Find the device meshes of this rank's parameters."""
        return list_device_meshes(self.chunks)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        meshes = _list_fsdp_meshes(self.chunks)
        if meshes:
            # Experts may be sharded over fewer ranks than there are ranks with different data.
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
        """The axes of DDP's group, and the axis along which FSDP2 replicates shards."""
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
        """The factor of DDP and FSDP2: 1 / the number of ranks of their group, or the factor that was set for FSDP2.

        For other reductions the script must state it, with `attach(grad_factor=...)`.
        """
        for ddp in list_ddp(self.chunks):
            return 1.0 / dist.get_world_size(ddp.process_group)
        groups = list(list_fsdp_groups(self.chunks))
        # Only the largest groups count: experts may be sharded over fewer ranks, with a factor that compensates for it.
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
        if isinstance(tensor, DTensor):  # its gradient is also a DTensor
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
    """Convert a mesh in any form that scripts may declare."""
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
    """List the DDP modules if they contain all trained parameters; otherwise return an empty list."""
    wrappers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel)]
    reduced = {id(parameter) for module in wrappers for parameter in module.parameters()}
    trained = (parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad)
    return wrappers if all(id(parameter) in reduced for parameter in trained) else []


def find_mesh(chunks: Sequence[nn.Module], device_meshes: Iterable[DeviceMesh], num_ranks: int) -> Mesh:
    """Combine the parameters' device meshes, each as a factorisation; with DDP, all ranks form the axis dp."""
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


def find_cut(mesh: DeviceMesh, size: int, held: torch.Tensor) -> Cut:
    """Find the axis of a one-dimensional mesh, and the split that gives this rank these indices in every sample.

    `held` has a row of indices for each sample. The load balancer that made them is a private API, so it is not read.
    """
    axis = read_axis_names(mesh)[0]
    first = rg.from_indices(held[0])
    for split in _KNOWN_SPLITS:
        if bool((held == held[0]).all()) and split.ranges(size, mesh.get_local_rank(), mesh.size()) == first:
            return Cut(axis, split)
    raise LayoutError(
        f"context_parallel splits {size} tokens over {axis}={mesh.size()} in an order that is not a known split: "
        f"this rank holds {first[:4]}. Write it as a @ttrace.split, and use it in rules."
    )


def _complete_mesh(mesh: DeviceMesh, root: DeviceMesh) -> Mesh:
    """Return the root that this mesh is a part of, or the root with the names of this mesh if it was unflattened.

    The axes of the root outside of an unflattened mesh have no names. They belong to pipelining.
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
    """Find the axes that a group of ranks spans; none if the group does not match the mesh."""
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
        raise CaptureError(f"the device meshes of the parameters cannot be combined: {error}") from None


def _list_fsdp_meshes(chunks: Sequence[nn.Module]) -> list[DeviceMesh]:
    """List the meshes over which FSDP2 shards and reduces, if it wraps anything."""
    return list(dict.fromkeys(group.mesh_info.mesh for group in list_fsdp_groups(chunks)))
