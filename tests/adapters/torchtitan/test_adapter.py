"""torchtitan's models are recognised; runs whose tensors have no types are refused; chunks of a loss are no losses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.adapters.adapter import FrameworkEvents
from ttrace.adapters.registry import find_adapter
from ttrace.adapters.torchtitan import compat
from ttrace.adapters.torchtitan.adapter import Torchtitan
from ttrace.errors import CaptureError
from ttrace.layouts.mesh import Mesh


class Decoder(nn.Module):
    """A model of torchtitan, as far as it is known by."""

    _skip_lm_head = False

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(x)
        return out


Decoder.__module__ = "torchtitan.models.common.decoder"


class ChunkedLossWrapper:
    """A loss that calls back while it runs."""

    def __call__(self, look: Callable[[], bool]) -> bool:
        return look()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(name: str, **content: Any) -> None:
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    return put


Attach = Callable[[str], tuple[Decoder, Torchtitan]]


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    attached = []

    def on(mesh: str) -> tuple[Decoder, Torchtitan]:
        monkeypatch.setattr("ttrace.adapters.native.adapter.find_rank_and_world", lambda: (0, 2))
        model = Decoder()
        attached.append(Torchtitan([model], mesh=Mesh.parse(mesh)))
        attached[-1].attach(FrameworkEvents())
        return model, attached[-1]

    yield on
    for each in attached:
        each.detach()


def test_a_model_is_recognised_by_its_class() -> None:
    assert find_adapter([Decoder()]) is Torchtitan
    assert find_adapter([nn.Linear(2, 2)]) is not Torchtitan


@pytest.mark.parametrize(
    ("backend", "is_checking", "mesh", "is_refused"),
    [
        ("spmd_types", False, "tp=2", True),
        ("spmd_types", True, "tp=2", False),
        ("spmd_types", False, "dp=2", False),
        ("partial_dtensor", False, "tp=2", False),
    ],
)
def test_tensors_that_are_cut_need_types(
    install: Callable[..., None],
    attach: Attach,
    backend: str,
    is_checking: bool,
    mesh: str,
    is_refused: bool,
) -> None:
    install("torchtitan.distributed.utils", get_spmd_backend=lambda: backend)
    install("spmd_types", is_type_checking=lambda: is_checking)
    model, adapter = attach(mesh)
    if is_refused:
        with pytest.raises(CaptureError, match=r"Set debug\.spmd_typechecking to true"):
            model(torch.zeros(1, 2))
        adapter.detach()
    model(torch.zeros(1, 2))


def test_backward_passes_inside_of_a_chunked_loss_are_parts(install: Callable[..., None], attach: Attach) -> None:
    install("torchtitan.components.loss", ChunkedLossWrapper=ChunkedLossWrapper)
    _, adapter = attach("dp=2")
    loss = ChunkedLossWrapper()
    assert not adapter.is_in_loss
    assert loss(lambda: adapter.is_in_loss)
    assert not adapter.is_in_loss
    adapter.detach()
    assert not loss(lambda: adapter.is_in_loss)


def test_the_head_is_not_watched_if_a_chunked_loss_calls_it(attach: Attach) -> None:
    model, adapter = attach("dp=2")
    assert adapter.is_watched("lm_head", isolated=False)
    model._skip_lm_head = True
    assert not adapter.is_watched("lm_head", isolated=False)
    assert adapter.is_watched("norm", isolated=False)


class Config:
    """A configuration that cannot be checked with pipelining."""

    def __init__(self, backend: str = "spmd_types", *, loss: object = None, **degrees: int) -> None:
        names = ("tensor", "context", "pipeline")
        wanted = {f"{name}_parallel_degree": degrees.get(name, 1) for name in names}
        self.parallelism = SimpleNamespace(spmd_backend=backend, **wanted)
        self.debug = SimpleNamespace(spmd_typechecking=False)
        self.loss = loss

    def __post_init__(self) -> None:
        if self.debug.spmd_typechecking and self.parallelism.pipeline_parallel_degree > 1:
            raise ValueError("not supported")


@pytest.mark.parametrize(
    ("config", "is_checked"),
    [
        (Config(tensor=2), True),
        (Config(), False),
        (Config("partial_dtensor", tensor=2), False),
        (Config(tensor=2, pipeline=2), False),
        (Config(context=2), False),
        (Config(context=2, loss=ChunkedLossWrapper()), True),
    ],
)
def test_types_are_switched_on_where_they_are_needed_and_possible(config: Config, is_checked: bool) -> None:
    compat.check_types(config)
    assert config.debug.spmd_typechecking is is_checked
