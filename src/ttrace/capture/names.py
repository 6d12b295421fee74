"""This module finds the names by which the reference would call modules and parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ttrace.tensors.ids import ROOT

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Attributes under which wrappers keep what they wrap."""


def canonical(path: str) -> str:
    """The path without wrappers; `.` for the model itself."""
    parts = [part for part in path.split(".") if part and part not in WRAPPERS]
    return ".".join(parts) or ROOT


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under its canonical name; a wrapper and what it wraps share a name, the inner one has it."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        found[canonical(path)] = module
    return iter(found.items())


def parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Every parameter once, under its first canonical name, and the other names of those that have several."""
    first: dict[int, str] = {}
    found: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical(path)
        if id(parameter) in first:
            if name != first[id(parameter)]:
                aliases[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        found[name] = parameter
    return found, aliases
