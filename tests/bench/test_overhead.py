"""The bench times a step that is recorded in full."""

from __future__ import annotations

from pathlib import Path

import torch

from bench._training import Training
from bench.overhead import cost
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace


def test_every_module_and_parameter_is_recorded_within_the_timed_step(tmp_path: Path) -> None:
    training = Training(tmp_path / "trace")
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    assert cost(training.traced("full")).seconds > 0
    trace = Trace(training.plan.out)
    assert list(trace.problems()) == []
    found = {(tensor_id.name, tensor_id.kind) for tensor_id in trace.shards}
    modules, parameters = trace.manifest.modules, trace.manifest.parameters
    for kind in (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT):
        # Token ids have no gradient: not as the model's input, nor as the embedding's.
        without = {".", "0"} if kind is Kind.GRAD_INPUT else set()
        assert {name for name in modules if (name, kind) not in found} == without
    for kind in (Kind.PARAM, Kind.PARAM_GRAD):
        assert {name for name in parameters if (name, kind) not in found} == set()
    assert not all(map(torch.equal, before, training.model.parameters()))
