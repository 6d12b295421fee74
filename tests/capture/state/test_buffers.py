"""Buffers are read before and after each step, also where a module puts another tensor in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.rules import Rules
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
        Plan.model_validate({"out": out, "stop": False, **plan}), model, optimizer, SimulatedRank(), Rules()
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
