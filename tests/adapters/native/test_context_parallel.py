"""The split of a sequence by context_parallel is observed, also in scripts that imported it by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from tests.support.releases import since
from ttrace.adapters.native.context_parallel import find_cut
from ttrace.capture.observe.events import SessionEvents
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.compat.torch import RELEASE
from ttrace.errors import LayoutError
from ttrace.layouts.layout import Cut
from ttrace.layouts.splits import Split
from zoo.harness.context import load_balance
from zoo.harness.ranks import on_ranks


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
    assert "in an order that is no known split" in message
    assert "@ttrace.split" in message
