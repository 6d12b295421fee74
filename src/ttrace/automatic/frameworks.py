"""Training loops of frameworks where they differ from those of scripts, and models that a script trains together.

Lightning calls a method of the model instead of the model. Ray Train runs the loop in a thread of a worker, which it
ends without running exit handlers. Megatron-LM returns its model and optimizer from a function, and runs each step in
another one. torchtitan states layouts only if its configuration enables it.

`join_models` combines several models into one module.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch import nn

from ttrace.adapters.torchtitan import compat
from ttrace.adapters.wrappers import RAY_RUNNER, find_wrapped, run_training_step
from ttrace.automatic.imports import OnImport
from ttrace.patches import Patches

STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
"""The modules of Lightning's strategies, under both names of the package."""
MEGATRON = "megatron.training.training"

OnModel = Callable[[Any, Any], Callable[[], AbstractContextManager[None]]]
"""A function that gets a model and its optimizer, and returns a function that makes the context of each step."""


def watch_frameworks(on_loop_end: Callable[[], object], on_model: OnModel, patches: Patches) -> dict[str, OnImport]:
    """Adapt the loops of frameworks, and return functions to call on imports, in the form that `watch_imports` takes.

    Call `on_loop_end` when a loop has ended but its process continues. Call `on_model` when a framework returns the
    model and the optimizer that it is going to train.
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


class JoinedModels(nn.Module):
    """A module that contains several models, named after their classes. It is never called itself."""


def join_models(models: Sequence[nn.Module]) -> nn.Module:
    """Return the only model, or a module that contains all of them."""
    if len(models) == 1:
        return models[0]
    joined, counts = JoinedModels(), Counter[str]()
    for model in models:
        name = _name_class(model)
        counts[name] += 1
        joined.add_module(name if counts[name] == 1 else f"{name}_{counts[name]}", model)
    return joined


def _wrap_trainer(method: Callable[..., None]) -> Callable[..., None]:
    """Enable the types that state the layouts of tensors."""

    @functools.wraps(method)
    def init(trainer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        compat.check_types(config)
        method(trainer, config, *args, **kwargs)

    return init


def _wrap_setup(on_model: OnModel, module: ModuleType, method: Callable[..., Any]) -> Callable[..., Any]:
    """Run each following step in the context that `on_model` makes."""

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
    """Let a strategy run the training step as a call of the model, as strategies that wrap the model do."""

    @functools.wraps(method)
    def training_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return run_training_step(method, strategy, *args, **kwargs)

    return training_step


def _wrap_run(on_loop_end: Callable[[], object], method: Callable[..., None]) -> Callable[..., None]:
    """Let a loop that exits with code 0 return instead: Ray would report a failure."""

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


def _name_class(model: nn.Module) -> str:
    """Return the class name of a model without its wrappers, in snake case."""
    if (inner := find_wrapped(model)) is not None:
        return _name_class(inner)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(model).__name__).lower()
