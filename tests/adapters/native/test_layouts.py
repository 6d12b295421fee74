"""DTensors say their own layout: regions, pending sums, axis names; all without a process group."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.device_meshes import device_mesh, mesh_of
from ttrace.adapters.native import layouts as adapter
from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource
from ttrace.layouts.region import Region, Shape


def find_indices(size: int, rank: int, *placements: Placement, shape: Shape = (2,)) -> list[int]:
    region = adapter.find_region((size,), device_mesh(shape, rank), placements)
    return rg.indices(region.dims[0]).tolist()


def test_strided_shards_are_exact() -> None:
    """A packed gate-up projection over two ranks: each holds half of the gate, then half of the up."""
    strided = _StridedShard(0, split_factor=2)
    assert find_indices(8, 0, strided) == [0, 1, 4, 5]
    assert find_indices(8, 1, strided) == [2, 3, 6, 7]


def test_strided_shards_under_sharding_are_exact() -> None:
    """FSDP over a tensor-parallel weight: the outer mesh axis cuts what the inner one left."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert [find_indices(8, rank, *placements, shape=(2, 2)) for rank in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_uneven_shards_end_short_or_empty() -> None:
    assert [find_indices(5, rank, Shard(0), shape=(4,)) for rank in range(4)] == [[0, 1], [2, 3], [4], []]


def test_replicated_and_pending_dims_are_whole() -> None:
    assert find_indices(5, 1, Replicate()) == list(range(5))
    assert find_indices(5, 1, Partial()) == list(range(5))


def test_ranks_do_not_share_a_cache_entry() -> None:
    """Meshes of different ranks are equal; only the coordinate tells them apart."""
    assert device_mesh((2,), 0) == device_mesh((2,), 1)
    assert find_indices(6, 0, Shard(0)) != find_indices(6, 1, Shard(0))


def test_each_dim_sees_only_its_own_placements() -> None:
    mesh = device_mesh((2, 2), 3)
    region = adapter.find_region((4, 6, 5), mesh, (Shard(2), Shard(0)))
    assert region == Region((4, 6, 5), (((2, 4),), ((0, 6),), ((3, 5),)))


def test_a_dtensor_is_placed_by_its_own_word() -> None:
    mesh = device_mesh((2, 2), 1, ("dp", "tp"))
    local = torch.zeros(4, 3)
    tensor = DTensor.from_local(
        local, mesh, [Partial(), Shard(1)], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )
    placement = adapter.read_placement(tensor)
    assert placement.region == Region((4, 6), (((0, 4),), ((3, 6),)))
    assert placement.pending == ("dp",)
    assert (placement.layout, placement.source) == ("d0 d1/tp +dp", LayoutSource.DTENSOR)
    assert adapter.read_local_values(tensor).data_ptr() == local.data_ptr()


def test_strided_shards_are_marked_in_the_text() -> None:
    mesh = device_mesh((2, 2), 0, ("dp", "tp"))
    text = adapter.format_layout(2, mesh, (_StridedShard(0, split_factor=2), Shard(0)))
    assert text == "d0/dp:strided(2)/tp d1"


def test_only_sums_are_pending() -> None:
    mesh = device_mesh((2,), 0, ("tp",))
    assert adapter.read_pending_axes(mesh, (Partial(),)) == ("tp",)
    assert adapter.read_pending_axes(mesh, (Shard(0),)) == ()
    message = "placement Partial(max) over tp: only pending sums can be added up from shards."
    with pytest.raises(LayoutError, match=re.escape(message)):
        adapter.read_pending_axes(mesh, (Partial("max"),))


def test_axes_have_the_authors_names_or_numbers() -> None:
    assert adapter.read_axis_names(device_mesh((2, 2), 0, ("dp", "tp"))) == ("dp", "tp")
    assert adapter.read_axis_names(device_mesh((2, 2), 0)) == ("axis0", "axis1")


def test_a_device_mesh_of_all_ranks_is_our_mesh() -> None:
    theirs = device_mesh((2, 3), 4, ("dp", "tp"))
    ours = adapter.convert_mesh(theirs)
    assert ours == Mesh.of(dp=2, tp=3)
    assert list(ours.coord(4).values()) == list(theirs.get_coordinate() or ())


def test_a_device_mesh_of_some_ranks_is_refused_with_what_to_do() -> None:
    part = mesh_of(torch.tensor([4, 5]), 4, ("tp",))
    with pytest.raises(LayoutError, match=re.escape("has ranks [4, 5]")) as error:
        adapter.convert_mesh(part)
    assert "Give attach(mesh=...) the mesh of all ranks." in str(error.value)


def test_ranks_with_microbatches_of_their_own_hold_whole_tensors() -> None:
    """Data-parallel ranks share a DTensor of all their rows; each holds a microbatch of its own."""
    mesh = device_mesh((2, 2), 3, ("dp", "tp"))
    tensor = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0), Shard(1)], run_check=False)
    placement = adapter.read_placement(tensor, frozenset({"dp"}))
    assert (placement.region.shape, placement.region.dims) == ((3, 8), (((0, 3),), ((4, 8),)))
    assert placement.layout == "d0 d1/tp"
    loss = DTensor.from_local(torch.zeros(()), mesh, [Partial(), Partial()], run_check=False)
    assert adapter.read_placement(loss, frozenset({"dp"})).pending == ("tp",)
