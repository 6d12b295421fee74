"""The steps of DeepSpeed's engine: when gradients are final, their norm and their clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ttrace.adapters.adapter import Optimizer
from ttrace.adapters.deepspeed.compat import CLIP, STEP, UNSCALE
from ttrace.adapters.events import FrameworkEvents
from ttrace.patches import Patches


def watch_engine(engine: Any, before: Callable[[Optimizer | None], None], after: Callable[[], None]) -> Patches:
    """Call `before` and `after` around each step that ends an accumulation, until the patches are removed."""

    def wrap(own_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            before(None)
            result = own_step(*args, **kwargs)
            after()
            return result

        return step

    patches = Patches()
    patches.wrap(engine, STEP, wrap)
    return patches


def watch_clip(zero: Any, engine_module: Any, events: FrameworkEvents) -> Patches:
    """Report the norm and the factor by which gradients are clipped, until the patches are removed."""

    def report(norm: torch.Tensor, max_norm: float) -> None:
        events.on_grad_norm(norm)
        events.on_clip(torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def wrap_clip(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
            norm = own(parameters, max_norm, *args, **kwargs)
            report(norm.detach().float().reshape(()), max_norm)
            return norm

        return clip

    def wrap_unscale(own: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(*args: Any, **kwargs: Any) -> Any:
            if zero.clip_grad > 0:
                # Beside the norm they get lists, or the number of a group.
                norm = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor | float))
                if not isinstance(norm, torch.Tensor):
                    norm = torch.tensor(norm, dtype=torch.float32, device="cpu")
                report(norm.detach().float().reshape(()) / zero.loss_scale, zero.clip_grad)
            return own(*args, **kwargs)

        return unscale

    patches = Patches()
    if hasattr(zero, UNSCALE):
        patches.wrap(zero, UNSCALE, wrap_unscale)
    else:
        patches.wrap(engine_module, CLIP, wrap_clip)
    return patches
