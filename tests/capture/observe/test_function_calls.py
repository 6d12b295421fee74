"""The operations of a module and of the script's own code have their lines, and so has what changes gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.layouts.ids import ROOT
from ttrace.trace.format import Operation
from ttrace.trace.reader import Trace
from zoo.harness.runs import SimulatedRank


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Doubled.apply(super().forward(x))  # type: ignore[no-untyped-call]  # torch's has no types
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * 2.0
        out: torch.Tensor = self.second(hidden.relu())
        return out


def score(out: torch.Tensor) -> torch.Tensor:
    doubled = out.square() * 2.0
    return F.relu(doubled).mean()


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 4


def trace(folder: Path, inside: tuple[str, ...], prepare: Callable[[Net], Any] = lambda _: None) -> dict[str, Any]:
    model = Net()
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    plan = Plan(out=folder / "trace", inside=inside, stop=False)
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    with session.step():
        score(model(torch.ones(2, 4))).backward()
        average(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    session.close()
    return dict(Trace(folder / "trace").operations)


def names(operations: tuple[Operation, ...]) -> list[str]:
    return [operation.slot for operation in operations]


def is_at(operation: Operation, function: Callable[..., Any], text: str) -> bool:
    lines, first = inspect.getsourcelines(function)
    return text in lines[int(operation.source.rpartition(":")[2]) - first]


def test_the_scripts_loss_is_part_of_the_models_own_code(tmp_path: Path) -> None:
    operations = trace(tmp_path, (ROOT,))[ROOT]
    assert names(operations) == ["mul.0", "relu.0", "square.0", "mul.1", "relu.1", "mean.0"]
    assert is_at(operations[3], score, "* 2.0")
    assert operations[3].takes == ("square.0",)


def test_what_the_script_does_to_a_gradient_is_known_and_clipping_is_not(tmp_path: Path) -> None:
    found = trace(tmp_path, ("first",))
    assert names(found["first.weight"]) == ["div_.0"]
    assert is_at(found["first.weight"][0], average, "/= 4")
    assert found["second.weight"] == found["first.weight"]  # for comparison


def test_what_a_hook_makes_of_a_gradient_is_known(tmp_path: Path) -> None:
    found = trace(tmp_path, ("first",), lambda model: model.first.weight.register_hook(halve))
    assert names(found["first.weight"]) == ["div.0", "div_.0"]
    assert is_at(found["first.weight"][0], halve, "/ 2")
    assert names(found["first.bias"]) == ["div_.0"]


def test_without_accused_modules_nothing_is_kept(tmp_path: Path) -> None:
    assert trace(tmp_path, ()) == {}


def test_custom_functions_are_recorded_after_a_backward_pass_too(tmp_path: Path) -> None:
    model = Doubling(4, 4)
    plan = Plan(out=tmp_path / "trace", inside=(ROOT,), stop=False)
    session = TracingSession(SessionParts(plan, model, None, SimulatedRank()))
    with session.step():
        for _ in range(2):
            model(session.batch(torch.ones(2, 4))).sum().backward()
    session.close()
    found = {tensor_id.microbatch for tensor_id in Trace(tmp_path / "trace").shards if "Doubled" in str(tensor_id)}
    assert found == {0, 1}
