"""Twins take the sums of products in parts, forward and in recomputation, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.support.device_meshes import device_mesh
from ttrace.capture.probes.split_sums import SplitSums

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
