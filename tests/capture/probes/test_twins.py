"""A twin's nudge moves what a rank holds, as all ranks that hold it move it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.support.device_meshes import device_mesh
from ttrace.adapters.native import layouts
from ttrace.capture.probes.probe import Visit
from ttrace.capture.probes.twins import Perturb, SplitSums
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


def test_a_mask_is_not_nudged_where_embeddings_are() -> None:
    mask = (torch.arange(16)[None] < torch.arange(1, 9)[:, None]).float()
    entry, rank = Visit(ENTRY, mask, None, entry=True), SimulatedRank(Mesh.of(dp=2), 0)
    assert Perturb(1, 0, rank, has_embeddings=True).visit(entry) is None
    assert Perturb(1, 0, rank).visit(entry) is not None, "nothing else may be nudged"
    assert Perturb(1, 0, rank, has_embeddings=True).visit(entry._replace(tensor=torch.randn(8, 16))) is not None


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


# Twins take the sums of products in parts, forward and in recomputation, and nothing else changes.


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w.t()),
    "linear with bias": lambda x, w: F.linear(x, w.t(), torch.ones(w.shape[1])),
    "batched": lambda x, w: torch.bmm(x.expand(3, -1, -1), w.expand(3, -1, -1)),
    "added": lambda x, w: torch.addmm(torch.ones(w.shape[1]), x, w, beta=0.5, alpha=2.0),
    "added to a batch": lambda x, w: torch.baddbmm(torch.ones(1), x[None], w[None], beta=2.0, alpha=0.5),
}


def make_factors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(16, 256).to(dtype), torch.randn(256, 32).to(dtype)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_rounds_in_another_way(name: str) -> None:
    x, w = make_factors()
    whole = PRODUCTS[name](x, w)
    with SplitSums(1, 0):
        split = PRODUCTS[name](x, w)
    assert not torch.equal(split, whole)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)


def test_each_twin_parts_its_sums_elsewhere_and_always_there() -> None:
    x, w = make_factors()
    found = []
    for twin in (1, 2, 3, 1):
        with SplitSums(twin, 0):
            found.append(x @ w)
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_short_numbers_and_integers_are_left_alone(dtype: torch.dtype) -> None:
    x, w = make_factors(dtype)
    whole = x @ w
    with SplitSums(1, 0):
        assert torch.equal(x @ w, whole)


def test_the_backward_pass_is_left_alone() -> None:
    x, w = make_factors()
    gradients = []
    for mode in (None, SplitSums(1, 0)):
        weight = w.clone().requires_grad_()
        y = x @ weight
        if mode is not None:
            with mode:
                y.sum().backward()
        else:
            y.sum().backward()
        gradients.append(weight.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_repeats_the_forward_pass(use_reentrant: bool) -> None:
    x, w = make_factors()
    seen: list[torch.Tensor] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        seen.append(y.detach().clone())
        return y.sin()

    with SplitSums(1, 0):
        checkpoint(multiply, x.requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_shapes_are_inferred_as_ever() -> None:
    with SplitSums(1, 0), FakeTensorMode():
        assert (torch.empty(3, 8) @ torch.empty(8, 5)).shape == (3, 5)


@pytest.mark.own_defaults
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_and_what_is_compiled_run_as_ever() -> None:
    """Modes see no operators of operators unless they say so, and `fullgraph` compiles nothing below most modes."""
    query = torch.randn(1, 2, 128, 16)
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    expected = flex_attention(query, query, query)
    with SplitSums(1, 0):
        assert torch.equal(flex_attention(query, query, query), expected)
        assert torch.equal(double(query), query * 2)


def test_products_of_shards_are_parted_too() -> None:
    x, w = make_factors()
    mesh = device_mesh((1,), 0)
    left, right = (DTensor.from_local(tensor, mesh, run_check=False) for tensor in (x, w))
    with SplitSums(1, 0):
        split = left @ right
    assert isinstance(split, DTensor)
    assert not torch.equal(split.to_local(), x @ w)
