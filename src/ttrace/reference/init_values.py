"""Distributions of parameters that were never initialised: a rule in place of an initial spread.

An ordinary reference generates each parameter with the mean and spread that its initialisation gave it. A model on the
meta device has none, so they follow from what the parameter is:

| parameter | mean | std |
|---|---|---|
| `weight` of a module with "norm" in its class's name | 1 | 0.02 |
| any other with one dim or none: biases, gains | 0 | 0.02 |
| all others: matrices, tables, experts | 0 | 0.02, but at most 1 / sqrt(last dim) |

The cap keeps activations of wide layers from growing with the width. No parameter is constant: zero biases and unit
norms hide bugs.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from ttrace.errors import CaptureError
from ttrace.values.generate import Normal

STD = 0.02

Spreads = Mapping[str, tuple[float, float]]
"""Mean and std by pattern over names of parameters; the last match wins."""


def choose_distribution(name: str, parameter: torch.Tensor, owner: nn.Module, stated: Spreads) -> Normal:
    """Choose the distribution to generate a parameter from."""
    for pattern, (mean, std) in reversed(list(stated.items())):
        if fnmatchcase(name, pattern):
            return Normal(float(mean), float(std))
    if parameter.ndim < 2:
        is_gain = "norm" in type(owner).__name__.lower() and name.endswith("weight")
        return Normal(1.0 if is_gain else 0.0, STD)
    return Normal(0.0, min(STD, max(parameter.shape[-1], 1) ** -0.5))


def check_patterns(stated: Spreads, names: list[str]) -> None:
    """Refuse a pattern that matches no parameter: nobody would notice this mistake."""
    for pattern in stated:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CaptureError(
                f"spreads has {pattern!r}, but no parameter of that name is streamed; the first is {names[0]}."
            )
