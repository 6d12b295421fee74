"""The mesh of a model is found where its parameters lie; all without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel

from tests.support.device_meshes import device_mesh, mesh_of
from tests.support.releases import since
from ttrace.adapters.native.adapter import find_cut, find_mesh, list_device_meshes
from ttrace.capture.observe.events import SessionEvents
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.compat.torch import RELEASE
from ttrace.errors import CaptureError, LayoutError
from ttrace.layouts.layout import Cut
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.region import Shape
from ttrace.layouts.splits import Split
from zoo.harness.context import load_balance
from zoo.harness.ranks import on_ranks


def make_model_on(*meshes: tuple[Shape, tuple[str, ...]]) -> nn.Module:
    """Make a model with one parameter on each of these meshes."""
    model = nn.Module()
    for i, (shape, names) in enumerate(meshes):
        placements = [Shard(0)] * len(shape)
        local = DTensor.from_local(torch.zeros(2, 2), device_mesh(shape, 0, names), placements, run_check=False)
        model.register_parameter(f"p{i}", nn.Parameter(local))
    return model


def find(model: nn.Module) -> Mesh:
    return find_mesh([model], list_device_meshes([model]), 8)


def test_meshes_of_the_same_ranks_are_factorisations() -> None:
    model = make_model_on(((4, 2), ("fsdp", "tp")), ((2, 4), ("efsdp", "ep")), ((4, 2), ("fsdp", "tp")))
    assert find(model) == Mesh.parse("fsdp=4 tp=2 | efsdp=2 ep=4")


def test_a_mesh_of_fewer_ranks_is_left_out() -> None:
    assert find(make_model_on(((2,), ("tp",)), ((4, 2), ("dp", "tp")))) == Mesh.of(dp=4, tp=2)


def test_meshes_that_name_an_axis_differently_are_refused() -> None:
    with pytest.raises(
        CaptureError,
        match=r"device meshes of the parameters cannot be combined: .*axis tp has a different size or stride",
    ):
        find(make_model_on(((4, 2), ("dp", "tp")), ((2, 4), ("cp", "tp"))))


@pytest.mark.parametrize(
    ("ranks", "names", "expected"),
    [
        ([[0, 1], [2, 3], [4, 5], [6, 7]], ("fsdp", "tp"), "fsdp=4 tp=2"),
        ([[4, 5], [6, 7]], ("fsdp", "tp"), "pp=2 fsdp=2 tp=2"),
        ([[[0]], [[2]], [[4]], [[6]]], ("fsdp", "one", "other"), "fsdp=4 pp=2 one=1 other=1"),
    ],
)
def test_axes_of_an_unflattened_mesh_keep_their_names(
    monkeypatch: pytest.MonkeyPatch, ranks: list[object], names: tuple[str, ...], expected: str
) -> None:
    """torchtitan cuts one mesh of all ranks in several ways; the root has an axis called world."""
    root = device_mesh((8,), 0, ("world",))
    monkeypatch.setattr("ttrace.adapters.native.adapter.find_root_mesh", lambda _: root)
    inner = mesh_of(torch.tensor(ranks), 0, names)
    assert find_mesh([], [inner], 8) == Mesh.parse(expected)


# The split of a sequence by context_parallel is observed, also in scripts that imported it by name.


class SplitObserver(SessionEvents):
    """Observer that keeps each split of a sequence."""

    def __init__(self) -> None:
        self.splits: list[Cut | str] = []

    def on_sequence_split(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        try:
            self.splits.append(find_cut(mesh, size, held))
        except LayoutError as error:
            self.splits.append(str(error))


def observe_splits() -> dict[str, Any]:
    """Observe each way to split a sequence; call this on every rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    samples = torch.arange(32).view(2, 16)
    splits: dict[str, Any] = {}

    def shard_by_documents() -> None:
        from torch.distributed.tensor.experimental._attention import (
            _context_parallel_shard,
            _PerDocumentHeadTailLoadBalancer,
        )

        documents = _PerDocumentHeadTailLoadBalancer([[16], [8, 8]], 2, "cpu")
        _context_parallel_shard(mesh, [samples.clone()], [1], documents)

    def run(*, balanced: bool = True, tokens: int = 16) -> None:
        with load_balance(balanced), context_parallel(mesh, buffers=[torch.arange(tokens)], buffer_seq_dims=[0]):
            pass

    cases: dict[str, Callable[[], None]] = {
        "zigzag": run,
        "plain": lambda: run(balanced=False),
    }
    if RELEASE >= (2, 13):  # before, torch itself refuses
        cases["not divisible"] = lambda: run(tokens=10)
    if RELEASE >= (2, 10):
        cases["documents"] = shard_by_documents
    for name, case in cases.items():
        observer = SplitObserver()
        with patch_torch(observer):
            case()
        splits[name] = observer.splits
    return splits


@pytest.fixture(scope="module")
def splits() -> list[dict[str, Any]]:
    return on_ranks(2, observe_splits)


@pytest.mark.parametrize(
    ("case", "split"),
    [
        ("zigzag", Split("zigzag")),
        ("plain", Split()),
        pytest.param("not divisible", Split(), marks=since(2, 13, "sequences that two ranks do not halve")),
    ],
)
def test_axis_and_order_are_heard_on_every_rank(splits: list[dict[str, Any]], case: str, split: Split) -> None:
    assert [rank[case] for rank in splits] == [[Cut("cp", split)]] * 2


@since(2, 10, "load balancers of documents")
def test_an_order_that_differs_between_samples_is_no_split(splits: list[dict[str, Any]]) -> None:
    (message,) = splits[0]["documents"]
    assert "in an order that is not a known split" in message
    assert "@ttrace.split" in message
