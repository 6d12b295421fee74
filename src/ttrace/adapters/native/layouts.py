"""Layouts of DTensors, read exactly from their placements, including strided and uneven shards."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import Placement as DTensorPlacement

from ttrace.compat.distributed import make_strided_shard, mask_partial, read_strided_shard, split_locally
from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource, Placement, Provenance
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region, Shape


def read_placement(tensor: DTensor, apart: Collection[str] = ()) -> Placement:
    """Read the placement of this rank's part of a DTensor; along the axes `apart` each rank has a different tensor."""
    mesh, placements, shape = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
    if not set(apart).isdisjoint(read_axis_names(mesh)):
        shape, placements = _take_apart(shape, mesh, placements, apart)
    region = find_region(shape, mesh, placements)
    text = format_layout(len(shape), mesh, placements)
    by = Provenance(LayoutSource.DTENSOR)
    return Placement(region, read_pending_axes(mesh, placements), text, by, frozenset(read_axis_names(mesh)))


def _take_apart(
    shape: Shape, mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...], apart: Collection[str]
) -> tuple[Shape, tuple[DTensorPlacement, ...]]:
    """Return the shape and placements of a rank's tensor if each rank along the axes `apart` has a different one."""
    is_apart = [axis in apart for axis in read_axis_names(mesh)]
    cutting = tuple(own if away else Replicate() for own, away in zip(placements, is_apart, strict=True))
    rest = tuple(Replicate() if away else own for own, away in zip(placements, is_apart, strict=True))
    return find_region(shape, mesh, cutting).local_shape, rest


def find_region(shape: Shape, mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...]) -> Region:
    """Find the region of a tensor of this shape that this rank holds."""
    here = tuple(mesh.get_coordinate() or ())
    return Region(shape, tuple(_find_dim_ranges(size, dim, mesh, placements, here) for dim, size in enumerate(shape)))


def read_local_values(tensor: DTensor) -> torch.Tensor:
    """Read this rank's part as it counts in a pending sum: a vocabulary-parallel embedding masks other ranks' rows."""
    local = tensor.to_local()
    for placement in tensor.placements:
        local = mask_partial(placement, local)
    return local


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor that is placed like another, with these values on this rank."""
    distributed: DTensor = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return distributed


def read_pending_axes(mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...]) -> tuple[str, ...]:
    """Read the axes over which a DTensor is still to be summed."""
    pending = []
    for axis, placement in zip(read_axis_names(mesh), placements, strict=True):
        if not placement.is_partial():
            continue
        if not isinstance(placement, Partial) or placement.reduce_op != "sum":
            raise LayoutError(f"placement {placement!r} over {axis}: only pending sums can be added up from shards.")
        pending.append(axis)
    return tuple(pending)


def read_axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Read the mesh's axis names; axis0, axis1, ... if it has none."""
    return mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))


def convert_mesh(device_mesh: DeviceMesh) -> Mesh:
    """Convert a DeviceMesh that spans ranks 0, 1, 2, ... in row-major order to our mesh."""
    ranks = device_mesh.mesh
    if ranks.flatten().tolist() != list(range(ranks.numel())):
        raise LayoutError(
            f"the device mesh has ranks {ranks.flatten().tolist()}; only ranks 0, 1, 2, ... in row-major order can "
            "be traced. Give attach(mesh=...) the mesh of all ranks."
        )
    return Mesh((tuple(zip(read_axis_names(device_mesh), ranks.shape, strict=True)),))


def format_layout(num_dims: int, mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...]) -> str:
    """Write the placements in the layout notation for users; strided shards are marked, but not described."""
    words = [f"d{dim}" for dim in range(num_dims)]
    pending = []
    for axis, placement in zip(read_axis_names(mesh), placements, strict=True):
        if placement.is_partial():
            pending.append(f"+{axis}")
        elif (strided := read_strided_shard(placement)) is not None:
            words[strided[0]] += f"/{axis}:strided({strided[1]})"
        elif isinstance(placement, Shard):
            words[placement.dim] += f"/{axis}"
    return " ".join(words + pending)


@lru_cache(maxsize=4096)
def _find_dim_ranges(
    size: int,
    dim: int,
    mesh: DeviceMesh,
    placements: tuple[DTensorPlacement, ...],
    here: tuple[int, ...],  # noqa: ARG001
) -> Ranges:
    """Let torch distribute the indices of one dim like the tensor, and return those of this rank.

    `here` is only a key of the cache: meshes of different ranks are equal, and ranks may be threads.
    compute_local_shape_and_global_offset returns only the first offset, so it is wrong for strided shards
    (tests/adapters/native/test_layouts.py::test_strided_shards_are_exact).
    """
    along = [_project_placement(placement, dim) for placement in placements]
    if all(placement.is_replicate() for placement in along):
        return rg.whole(size)
    local = split_locally(torch.arange(size, device="cpu"), mesh, along)
    return rg.from_indices(local)


def _project_placement(placement: DTensorPlacement, dim: int) -> DTensorPlacement:
    """Return the placement that a one-dimensional tensor of this dim's indices would have."""
    strided = read_strided_shard(placement)
    if strided is not None:
        along: DTensorPlacement = make_strided_shard(0, strided[1]) if strided[0] == dim else Replicate()
        return along
    if isinstance(placement, Shard):
        return Shard(0) if placement.dim == dim else Replicate()
    return Replicate()
