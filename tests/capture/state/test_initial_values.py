"""A parameter's own values are summed up before they are replaced, and forgotten if others may have replaced them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.capture.state.gradients import StaleGradients
from ttrace.capture.state.initial_values import InitialState, may_repeat, read_initial_values
from ttrace.trace.format import End
from ttrace.trace.reader import Trace
from ttrace.values.checksum import compute_checksum
from zoo.harness.runs import SimulatedRank


def trace(folder: Path, model: nn.Module, **settings: Any) -> End:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(out=folder / "reference", stop=False, **settings)
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    with session.step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    end = Trace(folder / "reference").ranks[0].end
    assert end is not None
    return end


def test_the_reference_records_its_own_values_and_stale_gradients(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    own = model.weight.detach().clone()
    model.weight.grad, model.bias.grad = torch.ones(4, 4), torch.zeros(4)
    end = trace(tmp_path, model)
    assert set(end.initial) == {"weight", "bias"}
    assert end.initial["weight"].crc == compute_checksum(own)
    assert end.initial["weight"].std == pytest.approx(float(own.double().std(correction=0)))
    assert end.stale == ("weight",)


@pytest.mark.parametrize("settings", [{"parameters": "own"}, {"isolated": True}])
def test_values_that_are_not_replaced_or_not_the_first_are_not_read(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert trace(tmp_path, nn.Linear(4, 4), **settings).initial == {}


def test_values_that_change_after_attach_are_forgotten() -> None:
    model = nn.Linear(4, 4)
    state = InitialState(dict(model.named_parameters()), Native([model]), is_reference=True)
    state.on_attached()
    model.load_state_dict({"weight": torch.ones(4, 4), "bias": model.bias.detach().clone()}, assign=False)
    with torch.no_grad():
        model.weight.add_(1.0)
    state.on_start()
    state.on_forward()
    assert "weight" not in state.values


def test_values_that_are_not_there_are_not_read() -> None:
    parameters = {
        "meta": nn.Parameter(torch.empty(4, device="meta")),
        "infinite": nn.Parameter(torch.full((4,), torch.inf)),
        "empty": nn.Parameter(torch.empty(0)),
        "there": nn.Parameter(torch.ones(4)),
    }
    found = read_initial_values(parameters, Native([nn.Linear(1, 1)]), is_reference=True)
    assert list(found) == ["there"]
    assert found["there"].is_constant


def test_parts_that_may_be_equal_are_seen_along_every_dim() -> None:
    drawn = torch.randn(8, 6)
    assert not may_repeat(drawn)
    assert may_repeat(drawn.repeat(3, 1))
    assert may_repeat(drawn.repeat(1, 2))
    assert may_repeat(torch.cat([drawn, torch.randn(8, 6), drawn, torch.randn(8, 6)]))


@pytest.mark.parametrize("drops", [True, False])
def test_stale_gradients_of_untraced_steps_are_dropped_once(drops: bool) -> None:
    model = nn.Linear(4, 4)
    stale = StaleGradients(dict(model.named_parameters()), Native([model]), drops_untraced=drops)
    assert stale.names is None
    for is_left in (not drops, True):
        model.weight.grad = torch.ones(4, 4).to_sparse() if drops else torch.ones(4, 4)
        stale.on_start()
        stale.on_backward()
        stale.on_backward()  # of the next microbatch
        assert (model.weight.grad is not None) is is_left
    assert stale.names == ("weight",)
