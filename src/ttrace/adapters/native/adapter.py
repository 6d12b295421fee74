"""This module knows plain PyTorch: ordinary modules, DTensor, FSDP2, DDP, pipelining, and a declared mesh.

What a framework knows it says itself: DTensors their placements, FSDP2 and DDP the axes along which ranks have data of
their own and what they divide gradients by, pipeline stages their microbatches.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ttrace.adapters.adapter import ANONYMOUS_AXIS, Handle, Listener, Optimizer, Piece, Recall, groups_of
from ttrace.adapters.native import layouts
from ttrace.adapters.wrappers import canonical
from ttrace.errors import CaptureError, LayoutError
from ttrace.layouts.placed import Placed
from ttrace.layouts.rules import Rule
from ttrace.reference.shared_modules import divided_in
from ttrace.tensors.ids import ROOT, Kind, Site, encode_name
from ttrace.tensors.mesh import Coord, Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from ttrace.adapters.transformers.layouts import Models

MeshLike = Mesh | DeviceMesh | Mapping[str, int] | str
DATA_AXIS, PIPELINE_AXIS, CONTEXT_AXIS = "dp", "pp", "cp"
"""The axes that are taken for data, pipeline and context parallelism where nothing says otherwise."""


class Native:
    """Plain modules and DTensors. The mesh is the declared one, else the DTensors', else one axis of all ranks."""

    models: Models | None = None
    """What transformers models say, if there are any."""

    def __init__(self, chunks: Sequence[nn.Module], mesh: MeshLike | None = None) -> None:
        self.rank, num_ranks = _rank_and_world()
        # DDP may be inside of what torch.compile made.
        self.chunks = chunks = [getattr(chunk, "_orig_mod", chunk) for chunk in chunks]
        self.models = _models(chunks)
        self.mesh = _declared(mesh) if mesh is not None else _found(chunks, self.models, num_ranks)
        if self.mesh.num_ranks != num_ranks:
            raise CaptureError(
                f"mesh {str(self.mesh)!r} has {self.mesh.num_ranks} ranks, but {num_ranks} run. Give attach(mesh=...) "
                "all axes of the job, slowest first; a single process needs none."
            )
        self.coord: Coord = self.mesh.coord(self.rank)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        meshes = _fsdp_meshes(self.chunks)
        if meshes:
            # Experts may be sharded over fewer ranks than have data of their own.
            widest = set(layouts.axis_names(max(meshes, key=lambda mesh: mesh.size()))) - {CONTEXT_AXIS}
            return tuple(axis for axis in self.mesh.sizes if axis in widest)
        return (DATA_AXIS,) if DATA_AXIS in self.mesh.sizes else ()

    @cached_property
    def distributing_axes(self) -> frozenset[str]:
        sharding = {axis for mesh in _fsdp_meshes(self.chunks) for axis in layouts.axis_names(mesh)} - {CONTEXT_AXIS}
        planned = self.models.distributing_axes(self.mesh) if self.models else frozenset()
        return frozenset(self.data_axes) | planned | ((sharding | {PIPELINE_AXIS}) & set(self.mesh.sizes))

    @cached_property
    def reduced_axes(self) -> frozenset[str]:
        """Those of DDP's group, and the one along which FSDP2's shards are replicated."""
        wrapped = [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]
        if wrapped and len(wrapped) == len(self.chunks):
            groups = [dist.get_process_group_ranks(chunk.process_group) for chunk in wrapped]
            return frozenset.intersection(*(_axes_along(self.mesh, ranks) for ranks in groups))
        replicated = {layouts.axis_names(mesh)[0] for mesh in _fsdp_meshes(self.chunks) if mesh.ndim == 2}
        return frozenset(replicated & set(self.mesh.sizes))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.models.notes()) if self.models else ()

    def name(self, chunk: nn.Module, path: str) -> str:
        return canonical(path, chunk)

    @cached_property
    def divided(self) -> frozenset[str]:
        return frozenset({ROOT, *(encode_name(path) for chunk in self.chunks for path in divided_in(chunk))})

    untraced: frozenset[Kind] = frozenset()

    def watches(self, name: str, *, isolated: bool) -> bool:  # noqa: ARG002
        return self.models is None or self.models.watches(name)

    @property
    def grad_factor(self) -> float:
        """FSDP2 and DDP divide by the number of ranks that they reduce over, or as FSDP2 was told.

        Hand-written code must say so itself.
        """
        ddp = next((chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)), None)
        if ddp is not None:
            return 1.0 / dist.get_world_size(ddp.process_group)
        groups = _fsdp_groups(self.chunks)
        # Of the groups that reduce over most ranks: experts may be sharded over fewer, and say what makes up for that.
        widest = max((group.mesh_info.mesh.size() for group in groups), default=1)
        divisors: Counter[float] = Counter()
        for group in groups:
            if group.mesh_info.mesh.size() == widest:
                divisors[float(group.gradient_divide_factor or widest)] += len(group.fsdp_params)
        return 1.0 / divisors.most_common(1)[0][0] if divisors else 1.0

    def listen(self, listener: Listener) -> None:
        if self.mesh.num_ranks > 1:
            from ttrace.adapters.native import schedule

            for chunk in self.chunks:
                schedule.listen(chunk, listener)

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        return layouts.placed(tensor) if isinstance(tensor, DTensor) else None

    def rule(self, site: Site, num_dims: int) -> Rule | None:  # noqa: ARG002
        return self.models.rule(site, self.mesh) if self.models else None

    def shares(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> None:
        pass

    def disagreements(self, parameters: Mapping[str, Placed]) -> Sequence[str]:  # noqa: ARG002
        return ()

    def parameters_replaced(self, optimizer: Optimizer | None) -> None:
        pass

    def steppers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        # ZeroRedundancyOptimizer keeps an optimizer of its own for this rank's share; importing it warns.
        inner = ((each, getattr(each, "optim", None)) for each in _each(optimizer))
        return [own if isinstance(own, torch.optim.Optimizer) else each for each, own in inner]

    def groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, Mapping[str, object]]]:
        known = {
            id(p): group for each in self.steppers(optimizer) for group in groups_of(each) for p in group["params"]
        }
        return ((parameter, known[id(parameter)]) for parameter in parameters if id(parameter) in known)

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        return [
            handle
            for each in _each(optimizer)
            for handle in (
                each.register_step_pre_hook(lambda *_: before()),
                each.register_step_post_hook(lambda *_: after()),
            )
        ]

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.detach()

    def gradient(self, parameter: nn.Parameter) -> Piece | None:
        return None if parameter.grad is None else Piece(parameter.grad)

    def updated(self, parameter: nn.Parameter) -> Piece | None:
        return Piece(parameter.detach())

    def optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Piece]:
        states = (keeper.state.get(parameter, {}) for keeper in self.steppers(optimizer))
        state: Mapping[str, object] = next(filter(None, states), {})
        return {str(key): Piece(value) for key, value in state.items() if isinstance(value, torch.Tensor)}

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:
        local = layouts.local_values(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return self.models.values(site, local, self.coord) if self.models and site else local

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return layouts.with_local(tensor, local) if isinstance(tensor, DTensor) else local


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
        return layouts.mesh_of(mesh)
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    return Mesh.of(**mesh)


def _models(chunks: Sequence[nn.Module]) -> Models | None:
    """What transformers models say of themselves; only a script that uses them has them loaded."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from ttrace.adapters.transformers import layouts as transformers_layouts

    return transformers_layouts.found(chunks)


def _found(chunks: Sequence[nn.Module], models: Models | None, num_ranks: int) -> Mesh:
    """The meshes that parameters lie on, each a factorisation; DDP's ranks all lie along dp."""
    lain_on = [p.device_mesh for chunk in chunks for p in chunk.parameters() if isinstance(p, DTensor)]
    meshes = dict.fromkeys([*lain_on, *(models.meshes() if models else ())])
    roots = dict.fromkeys(mesh._get_root_mesh() for mesh in meshes)
    if roots:
        widest = max(root.size() for root in roots)
        parts = [part for root in roots if root.size() == widest for part in layouts.mesh_of(root).factorisations]
        return _joined(tuple(dict.fromkeys(parts)))
    if num_ranks > 1 and any(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        return Mesh.of(**{DATA_AXIS: num_ranks})
    return Mesh.of(**{ANONYMOUS_AXIS: num_ranks}) if num_ranks > 1 else Mesh()


def _axes_along(mesh: Mesh, ranks: Sequence[int]) -> frozenset[str]:
    """The axes that a group of ranks spans; none where it is no part of the mesh."""
    coords = [mesh.coord(rank) for rank in ranks]
    for part in mesh.factorisations:
        spanned = {axis: size for axis, size in part if len({coord[axis] for coord in coords}) > 1}
        if math.prod(spanned.values()) == len(ranks):
            return frozenset(spanned)
    return frozenset()


def _joined(factorisations: tuple[tuple[tuple[str, int], ...], ...]) -> Mesh:
    try:
        return Mesh(factorisations)
    except LayoutError as error:
        raise CaptureError(f"the parameters lie on device meshes that do not go together: {error}") from None


def _fsdp_meshes(chunks: Sequence[nn.Module]) -> list[DeviceMesh]:
    """The meshes over which FSDP2 shards and reduces, if anything is wrapped by it."""
    return list(dict.fromkeys(group.mesh_info.mesh for group in _fsdp_groups(chunks)))


def _fsdp_groups(chunks: Sequence[nn.Module]) -> list[FSDPParamGroup]:
    """The parameters that FSDP2 shards together: of a module one group for each mesh that they lie on."""
    modules = (module for chunk in chunks for module in chunk.modules() if isinstance(module, FSDPModule))
    return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]


def _each(optimizer: Optimizer | None) -> Sequence[Optimizer]:
    """Several optimizers come as a list."""
    if optimizer is None:
        return ()
    return optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
