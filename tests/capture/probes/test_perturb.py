"""A twin's nudge moves what a rank holds, as all ranks that hold it move it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support.device_meshes import device_mesh
from ttrace.adapters.native import layouts
from ttrace.capture.probes.probe import Visit
from ttrace.capture.probes.twins import Perturb
from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Region
from zoo.harness.runs import SimulatedRank

ENTRY = TensorId.parse("0/0/./input")
FULL = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).add(3.0)


def nudge(tensor: torch.Tensor, placement: Placement | None, rank: int = 0) -> torch.Tensor:
    probe = Perturb(1, 0, SimulatedRank(Mesh.of(dp=2), rank))
    found = probe.visit(Visit(ENTRY, tensor, placement, entry=True))
    assert found is not None
    return found


def test_shards_are_nudged_where_they_lie() -> None:
    whole = nudge(FULL, Placement(Region.whole((6, 4)))) - FULL
    for rank, rows in enumerate((slice(0, 3), slice(3, 6))):
        mesh = device_mesh((2,), rank, ("dp",))
        tensor = DTensor.from_local(FULL[rows].clone(), mesh, [Shard(0)], run_check=False)
        found = nudge(tensor.requires_grad_(), layouts.read_placement(tensor), rank)
        assert isinstance(found, DTensor)
        assert found.placements == (Shard(0),)
        assert found.requires_grad
        change = found.to_local().detach() - FULL[rows]
        assert 0 < float(change.norm() / FULL[rows].norm()) < 1e-6
        assert bool((change * whole[rows] >= 0).all()), "in the direction in which the whole is moved"


def test_replicas_are_nudged_alike_and_summands_too() -> None:
    for placement in (Replicate(), Partial()):
        found = []
        for rank in range(2):
            mesh = device_mesh((2,), rank, ("dp",))
            tensor = DTensor.from_local(FULL.clone(), mesh, [placement], run_check=False)
            moved = nudge(tensor, layouts.read_placement(tensor), rank)
            assert isinstance(moved, DTensor)
            found.append(moved.to_local())
        assert found[0].equal(found[1])
        assert not found[0].equal(FULL)


def test_padding_is_left_alone() -> None:
    padded = torch.cat([FULL, torch.zeros(2, 4)])
    found = nudge(padded, Placement(Region.whole((6, 4))))
    assert not found[:6].equal(FULL)
    assert found[6:].equal(torch.zeros(2, 4))
