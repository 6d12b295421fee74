"""Random numbers that a script draws outside of its modules: data, or what data is chosen by.

The functions are replaced when torch has been imported, before the script can import them by name. Where a draw is made
is told by the line of the script: lines that only run before training, as those that make a dataset, never come again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ttrace.compat.torch import let_script
from ttrace.patches import Patches

Line = tuple[str, int]
"""A file and a line in it."""
OnDraw = Callable[[Line, torch.Tensor, bool], torch.Tensor]
"""A function that gets the line of a draw, the numbers, and whether they lie between 0 and 1. It returns other ones."""

_UNIT = ("rand", "rand_like")
_OTHER = ("randn", "randn_like", "randint", "randint_like", "normal", "bernoulli")


def watch_draws(on_draw: OnDraw, patches: Patches) -> None:
    """Call `on_draw` for random tensors that a script makes, until the patches are removed."""
    for name in (*_UNIT, *_OTHER):
        patches.wrap(torch, name, functools.partial(_wrap, is_unit=name in _UNIT, on_draw=on_draw))


def _wrap(function: Callable[..., Any], *, is_unit: bool, on_draw: OnDraw) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        drawn = function(*args, **kwargs)
        if torch.compiler.is_compiling() or "out" in kwargs or not _is_data(drawn):
            return drawn
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None:
            return drawn
        return on_draw((caller.f_code.co_filename, caller.f_lineno), drawn, is_unit)

    let_script(draw, function)
    return draw


def _is_data(drawn: Any) -> bool:
    """Whether this may be data: no tensor of a tracer, no parameter, and more than one number."""
    return type(drawn) is torch.Tensor and not drawn.is_meta and not drawn.requires_grad and drawn.numel() > 1
