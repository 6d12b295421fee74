"""Settings of the optimizer, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
"""Settings of torch's optimizers that decide the value of an update; others decide how it is computed."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The distinct settings of an optimizer's groups, and which of them each parameter has."""

    groups: tuple[dict[str, str], ...] = ()
    by_parameter: Mapping[str, int] = field(default_factory=dict)
    """By name, an index into `groups`. A parameter that is in no group is left out."""


def read_settings(grouped: Iterable[tuple[str, Mapping[str, object]]]) -> OptimizerSettings:
    """Read the settings of every parameter, given by name with its group. Groups with equal settings become one."""
    texts: dict[int, tuple[tuple[str, str], ...]] = {}  # by group, as many parameters share one
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    by_parameter = {}
    for name, group in grouped:
        if id(group) not in texts:
            texts[id(group)] = tuple((key, _format(group[key])) for key in _DECIDING if group.get(key) is not None)
        by_parameter[name] = numbers.setdefault(texts[id(group)], len(numbers))
    return OptimizerSettings(tuple(map(dict, numbers)), by_parameter)


def _format(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_format, value))})"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return f"{float(value):g}" if isinstance(value, (int, float)) else str(value)
