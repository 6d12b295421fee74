"""Buffers are read before and after each step, also where a module puts another tensor in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.capture.state.model_state import OptimizerSettings, read_settings
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from zoo.harness.runs import SimulatedRank


class Counted(nn.Module):
    """Module that counts its calls in a buffer, a new tensor after each, and has a buffer that only a step changes."""

    calls: torch.Tensor
    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x + self.bias


class Normalised(nn.Module):
    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm, self.counted = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), Counted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.counted(self.norm(self.first(x)))
        return out


def trace_step(
    out: Path, model: Normalised, after: Callable[[Normalised], None] = lambda _: None, **plan: object
) -> Trace:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = TracingSession(
        SessionParts(Plan.model_validate({"out": out, "stop": False, **plan}), model, optimizer, SimulatedRank())
    )
    for _ in range(session._plan.num_steps):
        with session.step():
            model(session.batch(torch.randn(16, 4))).square().mean().backward()
            with torch.no_grad():
                model.counted.bias += 1.0
            optimizer.step()
            optimizer.zero_grad()
            after(model)
    return Trace(out)


def judge(folder: Path, model: Normalised, after: Callable[[Normalised], None] = lambda _: None) -> Judgement:
    reference = trace_step(folder / "reference", Normalised())
    known: dict[str, Any] = {"reference": reference.folder}
    twins = [trace_step(folder / f"twin-{i}", Normalised(), role="twin", twin=i, **known) for i in (1, 2, 3)]
    return check(reference, twins, trace_step(folder / "candidate", model, after, role="candidate", **known))


def test_buffers_after_the_last_step_are_judged(tmp_path: Path) -> None:
    judgement = judge(tmp_path, Normalised())
    after = {c.id.name: c for c in judgement.comparisons if c.id.kind is Kind.BUFFER_AFTER}
    assert judgement.exit is Exit.PASSED
    assert list(after) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "counted.calls",
        "counted.bias",
    ]
    assert {c.verdict for c in after.values()} == {Verdict.PASS}
    tolerances = [c.tolerance.value for c in after.values() if c.tolerance is not None]
    assert [bool(value) for value in tolerances] == [True, True, False, True, True], "integers are compared exactly"


def test_wrong_statistics_are_found_at_their_module(tmp_path: Path) -> None:
    judgement = judge(tmp_path, Normalised(momentum=0.11))
    assert judgement.exit is Exit.FOUND
    (finding,) = judgement.findings
    assert (finding.module, finding.comparison.id.kind) == ("norm", Kind.BUFFER_AFTER)


@pytest.mark.parametrize("name", ["running_var", "num_batches_tracked"])
def test_one_wrong_buffer_is_found(tmp_path: Path, name: str) -> None:
    def spoil(model: Normalised) -> None:
        getattr(model.norm, name).add_(1)

    judgement = judge(tmp_path, Normalised(), spoil)
    assert judgement.exit is Exit.FOUND
    assert [str(finding.comparison.id) for finding in judgement.findings] == [f"0/-/norm.{name}/buffer_after"]


def test_another_tensor_in_a_buffers_place_is_read(tmp_path: Path) -> None:
    trace = trace_step(tmp_path, Normalised(), num_steps=2)
    read = {str(t): float(shards[0].tensor()) for t, shards in trace.shards.items() if t.name == "counted.calls"}
    kinds = (Kind.BUFFER, Kind.BUFFER_AFTER)
    assert read == {
        str(TensorId.of(step, None, "counted.calls", kind)): float(step + i)
        for step in (0, 1)
        for i, kind in enumerate(kinds)
    }


def test_the_reference_says_which_buffers_forward_passes_change(tmp_path: Path) -> None:
    trace = trace_step(tmp_path, Normalised())
    assert trace.forward_buffers == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "counted.calls",
    }


# An optimizer's settings are read parameter by parameter, from whatever groups it has.


def settings_of(optimizer: Any, model: nn.Module) -> OptimizerSettings:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return read_settings((names[p], group) for p, group in SimulatedRank().find_groups(optimizer, names))


def test_each_parameter_has_the_settings_of_its_group() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.0},
        {"params": model[1].parameters(), "lr": torch.tensor(0.5)},
        {"params": [], "lr": 7.0},
    ]
    found = settings_of(torch.optim.AdamW(groups, lr=0.01, foreach=False), model)
    assert found.by_parameter == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}  # nobody updates the last
    first, second = found.groups
    assert (first["lr"], second["lr"]) == ("0.01", "0.5")
    assert (first["weight_decay"], second["weight_decay"]) == ("0", "0.01")
    assert first["betas"] == "(0.9, 0.999)"
    assert "foreach" not in first


def test_groups_that_are_set_alike_are_kept_once() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    groups = [{"params": [p], "weight_decay": 0.0 if p.ndim < 2 else 0.1} for p in model.parameters()]
    found = settings_of(torch.optim.AdamW(groups, lr=0.01), model)
    assert len(found.groups) == 2
    assert {found.by_parameter[f"{layer}.bias"] for layer in range(50)} == {1}


def test_an_optimizer_of_another_make_says_what_it_has() -> None:
    model = nn.Linear(2, 2, bias=False)
    own = SimpleNamespace(param_groups=[{"params": [model.weight], "lr": "cosine", "betas": [0.9, None]}])
    found = settings_of([own, SimpleNamespace(), SimpleNamespace(param_groups=["odd"])], model)
    assert found == OptimizerSettings(({"lr": "cosine", "betas": "(0.9, None)"},), {"weight": 0})


def test_the_settings_of_an_outer_optimizer_are_the_newer_ones() -> None:
    """ZeroRedundancyOptimizer gives what a schedule changed to its inner optimizer when it steps."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    outer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer.optim = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    outer.param_groups[0]["lr"] = 0.5
    found = settings_of(outer, model)
    assert found.by_parameter == {"0.weight": 0, "0.bias": 0}  # the others belong to other ranks
    assert found.groups[0]["lr"] == "0.5"
