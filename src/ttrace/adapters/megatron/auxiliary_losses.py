"""Patch of Megatron's auxiliary losses: those that a router adds to its own gradient, beside the model's loss.

Only backward shows the weight of such a loss, since the schedule scales all of them. So the loss times its own gradient
is recorded: the summand of the objective that its gradients belong to.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from ttrace.adapters.events import FrameworkEvents
from ttrace.patches import Patches, SharedPatches

_events: WeakSet[FrameworkEvents] = WeakSet()


def watch_losses(events: FrameworkEvents, patches: Patches) -> None:
    """Report every auxiliary loss where it joins the gradient, until the patches are removed."""
    _shared.acquire()
    patches.on_remove(_shared.release)
    _events.add(events)
    patches.on_remove(functools.partial(_events.discard, events))


def _install(patches: Patches) -> None:
    functions: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    patches.wrap(functions.MoEAuxLossAutoScaler, "apply", _wrap_apply)


_shared = SharedPatches(_install)


def _wrap_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def scale(output: torch.Tensor, loss: torch.Tensor) -> Any:
        for events in _events:
            events.on_auxiliary_loss(loss)
        return apply(output, loss)

    return scale
