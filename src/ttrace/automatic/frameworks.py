"""Training loops of Lightning and Ray Train, as far as they differ from loops of scripts.

Lightning calls a method of the model in place of the model. Ray Train runs a loop in a thread of a worker, which it
ends without running exit handlers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ttrace.adapters.framework_compat import RAY_RUNNER, run_training_step
from ttrace.automatic.imports import OnImport
from ttrace.patches import Patches

STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
"""The modules of Lightning's strategies, under both names of the package."""


def watch_frameworks(on_loop_end: Callable[[], object], patches: Patches) -> dict[str, OnImport]:
    """Let loops run as TTrace needs them; call `on_loop_end` when one has ended in a process that goes on.

    The result has the form that `watch_imports` takes.
    """

    def on_lightning(module: ModuleType) -> None:
        patches.wrap(module.Strategy, "training_step", _wrap_training_step)

    def on_ray(module: ModuleType) -> None:
        patches.wrap(module.ThreadRunner, "run", functools.partial(_wrap_run, on_loop_end))

    return {**dict.fromkeys(STRATEGIES, on_lightning), RAY_RUNNER: on_ray}


def _wrap_training_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a strategy run the training step as a call of the model, as those do that wrap the model."""

    @functools.wraps(method)
    def training_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return run_training_step(method, strategy, *args, **kwargs)

    return training_step


def _wrap_run(on_loop_end: Callable[[], object], method: Callable[..., None]) -> Callable[..., None]:
    """Let exit code 0 end a loop as if it had returned: Ray takes it for a failure."""

    @functools.wraps(method)
    def run(runner: Any, loop: Callable[[], Any]) -> None:
        @functools.wraps(loop)
        def run_loop() -> Any:
            try:
                result = loop()
                on_loop_end()
            except SystemExit as error:
                if error.code:
                    raise
                return None
            return result

        method(runner, run_loop)

    return run
