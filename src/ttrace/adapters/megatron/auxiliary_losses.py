"""This module listens to auxiliary losses: those that a router adds to its own gradient, beside the model's loss.

Only backward says what one weighs, since the schedule scales all of them. So what counts is the loss times its own
gradient: the summand of the objective that its gradients belong to.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from ttrace.adapters.adapter import Listener

_listeners: WeakSet[Listener] = WeakSet()


def listen(listener: Listener) -> None:
    """Tell the listener of every auxiliary loss, where it joins the gradient."""
    _wrap_scaler()
    _listeners.add(listener)


@functools.cache
def _wrap_scaler() -> None:
    functions: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    scaler = functions.MoEAuxLossAutoScaler
    scaler.apply = _told(scaler.apply)


def _told(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def told(output: torch.Tensor, loss: torch.Tensor) -> Any:
        for listener in _listeners:
            listener.sees_auxiliary_loss(loss)
        return apply(output, loss)

    return told
