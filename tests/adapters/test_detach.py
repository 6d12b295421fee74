"""A session leaves torch, the framework and the model as they were before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.stage
import torch.distributed.tensor.experimental
import transformers
from torch import nn

from tests.support.attributes import Attributes
from ttrace.adapters.adapter import FrameworkEvents
from ttrace.adapters.native.adapter import Native
from ttrace.adapters.transformers.adapter import Transformers
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.errors import CaptureError
from ttrace.layouts.mesh import Mesh
from zoo.harness.runs import SimulatedRank


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.dropout = nn.Dropout(0.1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.gate = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(ids))
        x = self.attention(x, x, x, need_weights=False)[0]
        scores: torch.Tensor = self.gate(x)
        return scores.topk(2).values


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, session: TracingSession) -> None:
    ids = session.batch(torch.randint(16, (2, 4)))
    output: Any = model(ids)
    (output if isinstance(output, torch.Tensor) else output.logits).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Attributes:
    return Attributes(["torch", "transformers"], [*model.modules(), optimizer])


@pytest.mark.parametrize(("build", "adapter"), [(Router, Native), (llama, Transformers)])
def test_a_session_leaves_nothing_behind(build: Callable[[], nn.Module], adapter: type[Native], tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    session = TracingSession(SessionParts(Plan(out=tmp_path, stop=False), model, optimizer, adapter([model])))
    with session.step():
        assert [change for change in before.changes() if change.startswith("torch.autograd")]
        step(model, optimizer, session)
    session.close()
    assert list(before.changes()) == []


def test_nor_does_one_whose_step_fails(tmp_path: Path) -> None:
    model = Router()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    session = TracingSession(SessionParts(Plan(out=tmp_path, stop=False), model, optimizer, Native([model])))
    ids = torch.full((2, 4), 99)
    with pytest.raises(IndexError), session.step():
        model(ids)
    session.close()
    assert list(before.changes()) == []


def test_nor_does_one_that_cannot_start(tmp_path: Path) -> None:
    model = Router()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)

    class Broken(Native):
        def attach(self, events: FrameworkEvents) -> None:  # noqa: ARG002
            self.patches.replace(torch, "topk", None)
            raise CaptureError("broken")

    with pytest.raises(CaptureError, match="broken"):
        TracingSession(SessionParts(Plan(out=tmp_path, stop=False), model, optimizer, Broken([model])))
    assert list(before.changes()) == []


def test_pipeline_stages_get_their_methods_back() -> None:
    stage = nn.Linear(2, 2)
    before = Attributes(["torch"])
    first, second = (SimulatedRank(Mesh.of(pp=2), rank) for rank in range(2))
    for adapter in (first, second):
        adapter.chunks = [stage]
        adapter.attach(FrameworkEvents())
    first.detach()
    assert any("forward_one_chunk" in change for change in before.changes())
    second.detach()
    assert list(before.changes()) == []
    second.detach()
