"""Labels that a script hands to a loss of `torch.nn.functional`, outside of the model's call.

The functions are replaced when torch has been imported, before the script can import them by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch.nn import functional

from ttrace.patches import OutermostCall, Patches

OnTarget = Callable[[torch.Tensor], torch.Tensor]
"""A function that gets the labels of a loss, and returns those to use instead."""

_TARGET = "target"
_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses for which any real number is a label."""
_script = OutermostCall()


def watch_losses(on_target: OnTarget, patches: Patches) -> None:
    """Call `on_target` with the labels of every loss that may get other labels, until the patches are removed."""
    for name, function in inspect.getmembers(functional, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters)
        if _TARGET in parameters:
            position = parameters.index(_TARGET)
            patches.wrap(functional, name, functools.partial(_wrap_loss, position=position, on_target=on_target))


def _wrap_loss(function: FunctionType, *, position: int, on_target: OnTarget) -> Callable[..., Any]:
    def replace_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or _script.is_running:
            return function(*args, **kwargs)
        target: Any = kwargs.get(_TARGET, args[position] if position < len(args) else None)
        outputs = args[0] if args else kwargs.get("input")
        if _is_data(function.__name__, target) and isinstance(outputs, torch.Tensor) and outputs.requires_grad:
            other = on_target(target)
            if _TARGET in kwargs:
                kwargs[_TARGET] = other
            else:
                args = (*args[:position], other, *args[position + 1 :])
        return _script.run(function, *args, **kwargs)

    def loss(*args: Any, **kwargs: Any) -> Any:
        return replace_target(args, kwargs)

    # torch.jit.script compiles the source of the wrapped function, with the names that the wrapper sees.
    wrapper = FunctionType(loss.__code__, function.__globals__, function.__name__, closure=loss.__closure__)
    return functools.update_wrapper(wrapper, function)


def _is_data(name: str, target: Any) -> TypeGuard[torch.Tensor]:
    """Whether these are labels that may be any others of their kind, and no result of a trained module."""
    if not isinstance(target, torch.Tensor) or target.requires_grad:
        return False
    return not target.is_floating_point() or name in _REGRESSIONS
