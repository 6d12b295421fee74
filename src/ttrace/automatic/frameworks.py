"""Training loops of Lightning, Ray Train, Megatron-LM and torchtitan, as far as they differ from loops of scripts.

Lightning calls a method of the model in place of the model. Ray Train runs a loop in a thread of a worker, which it
ends without running exit handlers. Megatron-LM hands out its model and its optimizer, and has a function for each step.
torchtitan states layouts only where its configuration says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from ttrace.adapters.framework_compat import RAY_RUNNER, run_training_step
from ttrace.adapters.torchtitan import compat
from ttrace.automatic.imports import OnImport
from ttrace.patches import Patches

STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
"""The modules of Lightning's strategies, under both names of the package."""


MEGATRON = "megatron.training.training"

OnModel = Callable[[Any, Any], Callable[[], AbstractContextManager[None]]]
"""A function that gets a model and its optimizer, and returns what makes the context of each step."""


def watch_frameworks(on_loop_end: Callable[[], object], on_model: OnModel, patches: Patches) -> dict[str, OnImport]:
    """Let loops run as TTrace needs them; call `on_loop_end` when one has ended in a process that goes on.

    Call `on_model` where a framework hands out the model and the optimizer that it is going to train. The result has
    the form that `watch_imports` takes.
    """

    def on_lightning(module: ModuleType) -> None:
        patches.wrap(module.Strategy, "training_step", _wrap_training_step)

    def on_ray(module: ModuleType) -> None:
        patches.wrap(module.ThreadRunner, "run", functools.partial(_wrap_run, on_loop_end))

    def on_megatron(module: ModuleType) -> None:
        patches.wrap(module, "setup_model_and_optimizer", functools.partial(_wrap_setup, on_model, module))

    def on_torchtitan(module: ModuleType) -> None:
        patches.wrap(module.Trainer, "__init__", _wrap_trainer)

    engines = {RAY_RUNNER: on_ray, MEGATRON: on_megatron, compat.TRAINER: on_torchtitan}
    return {**dict.fromkeys(STRATEGIES, on_lightning), **engines}


def _wrap_trainer(method: Callable[..., None]) -> Callable[..., None]:
    """Let tensors have types that state their layouts."""

    @functools.wraps(method)
    def init(trainer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        compat.check_types(config)
        method(trainer, config, *args, **kwargs)

    return init


def _wrap_setup(on_model: OnModel, module: ModuleType, method: Callable[..., Any]) -> Callable[..., Any]:
    """Let each step that follows run in its context."""

    @functools.wraps(method)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        model, optimizer, *_ = result
        make_context, own_step = on_model(model, optimizer), module.train_step

        @functools.wraps(own_step)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            with make_context():
                return own_step(*args, **kwargs)

        module.train_step = train_step  # type: ignore[attr-defined]
        return result

    return setup_model_and_optimizer


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
