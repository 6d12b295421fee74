"""This module reads what an optimizer was told."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_DECIDING = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "maximize",
    "alpha",
)
"""Settings of torch's optimizers that decide what an update is; others decide how it is computed."""


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, tuple[str, ...]]:
    """By setting, the values of all groups of parameters: groups need not be the same on all ranks."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    found: dict[str, set[str]] = {}
    for group in groups:
        for name in _DECIDING if group.get("params") else ():
            if group.get(name) is not None:
                found.setdefault(name, set()).add(_spelled(group[name]))
    return {name: tuple(sorted(values)) for name, values in found.items()}


def _spelled(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_spelled, value))})"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return f"{float(value):g}" if isinstance(value, (int, float)) else str(value)
