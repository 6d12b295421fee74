"""A loop of Ray Train ends well, and its trace is complete before Ray ends the worker; Megatron-LM's is attached to."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
from torch import nn

from tests.support.loops import trace_loop
from ttrace.automatic.frameworks import MEGATRON
from ttrace.automatic.imports import watch_imports
from ttrace.layouts.ids import Kind
from ttrace.patches import Patches


def train(num_steps: int) -> int:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return num_steps


def run_in_ray(runner: Any, loop: Any) -> None:
    runner.run(loop)
    while runner.is_running():
        time.sleep(0.01)


@pytest.mark.parametrize("num_steps", [2, 5])
def test_a_loop_ends_without_an_error_when_it_is_traced(num_steps: int, tmp_path: Path) -> None:
    runner, reached = ThreadRunner(), []

    def loop() -> None:
        train(num_steps)
        reached.append(True)

    trace = trace_loop(tmp_path, lambda: run_in_ray(runner, loop), stop=True)
    assert runner.get_error() is None
    assert trace.shards
    assert bool(reached) == (num_steps == 2)  # a longer one is ended by TTrace


def test_an_exit_of_the_loop_stays_an_error(tmp_path: Path) -> None:
    runner = ThreadRunner()

    def loop() -> None:
        train(3)
        raise SystemExit(3)

    trace_loop(tmp_path, lambda: run_in_ray(runner, loop), num_steps=1)
    assert runner.get_error() is not None


def test_a_framework_that_hands_out_its_model_is_traced_from_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `megatron.training` does."""
    module: Any = ModuleType(MEGATRON)

    def setup_model_and_optimizer() -> tuple[list[nn.Module], torch.optim.Optimizer, None]:
        model = nn.Linear(8, 4)
        return [model], torch.optim.SGD(model.parameters(), lr=0.1), None

    def train_step(model: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        model[0](torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    module.setup_model_and_optimizer, module.train_step = setup_model_and_optimizer, train_step
    monkeypatch.setitem(sys.modules, MEGATRON, module)

    def loop() -> None:
        model, optimizer, _ = module.setup_model_and_optimizer()
        module.train_step(model, optimizer)

    trace = trace_loop(tmp_path, loop)
    assert trace.manifest.attachment is not None
    assert (trace.manifest.attachment.model, trace.manifest.attachment.keeps_data) == ("Linear", True)
    assert {t.name for t in trace.shards if t.kind is Kind.PARAM_AFTER} == {"weight", "bias"}
    assert module.setup_model_and_optimizer is setup_model_and_optimizer  # the rest is put back


# A function waits for the import of a module, whoever looks for the module before.


@pytest.mark.parametrize("is_sought", [False, True])
def test_a_function_is_called_when_its_module_is_imported(
    is_sought: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_package").mkdir()
    (tmp_path / "awaited_package" / "__init__.py").touch()
    (tmp_path / "awaited_package" / "awaited.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    patches, values = Patches(), []

    def on_import(module: ModuleType) -> None:
        values.append(module.VALUE)

    before = list(sys.meta_path)
    watch_imports({"awaited_package.awaited": on_import}, patches)
    try:
        if is_sought:
            assert importlib.util.find_spec("awaited_package.awaited") is not None
        assert values == []
        importlib.import_module("awaited_package.awaited")
        assert values == [7]
    finally:
        patches.remove()
        for name in [name for name in sys.modules if name.startswith("awaited_package")]:
            del sys.modules[name]
    assert sys.meta_path == before
