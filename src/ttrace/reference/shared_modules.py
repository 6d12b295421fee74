"""Modules of a stage, besides the model itself, of which every stage has a part."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_ATTRIBUTE = "_ttrace_divided"


def read_divided(stage: nn.Module) -> frozenset[str]:
    """Return the names that `set_divided` stored on this stage."""
    names: frozenset[str] = getattr(stage, _ATTRIBUTE, frozenset())
    return names


def set_divided(stage: nn.Module, names: Iterable[str]) -> None:
    object.__setattr__(stage, _ATTRIBUTE, frozenset(names))
