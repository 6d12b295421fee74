"""Training steps of Lightning, which calls a method of the model in place of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ttrace.adapters.framework_compat import run_training_step
from ttrace.automatic.imports import OnImport
from ttrace.patches import Patches

STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
"""The modules of Lightning's strategies, under both names of the package."""


def watch_steps(patches: Patches) -> dict[str, OnImport]:
    """Let every strategy run the training step as a call of the model, as those do that wrap the model.

    The result has the form that `watch_imports` takes.
    """

    def on_import(module: ModuleType) -> None:
        patches.wrap(module.Strategy, "training_step", _wrap_training_step)

    return dict.fromkeys(STRATEGIES, on_import)


def _wrap_training_step(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def training_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return run_training_step(method, strategy, *args, **kwargs)

    return training_step
