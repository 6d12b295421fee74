"""A loop of Ray Train ends well, and its trace is complete before Ray ends the worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
from torch import nn

from tests.support.loops import trace_loop


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
