"""Names of what lies in a model, without the wrappers that put a level between a model and its name."""

from __future__ import annotations

from torch import nn

from ttrace.compat.torch import WRAPPER_ATTRIBUTES, read_own_buffers
from ttrace.layouts.ids import ROOT, encode_name


def find_canonical_name(path: str, chunk: nn.Module) -> str:
    """Find the name of what lies at this path of a chunk: without wrappers, and encoded; `.` for the model itself."""
    parts = path.split(".") if path else []
    wrappers = find_wrapper_levels(path, chunk)
    return encode_name(".".join(part for i, part in enumerate(parts) if i not in wrappers)) or ROOT


def find_wrapped(module: nn.Module) -> nn.Module | None:
    """Find the module that a wrapper holds; None if this is no wrapper."""
    return next((child for name in WRAPPER_ATTRIBUTES if (child := module._modules.get(name)) is not None), None)


def find_wrapper_levels(path: str, chunk: nn.Module) -> frozenset[int]:
    """Find the parts of a path that stand for a wrapper's level, by position."""
    levels, module = set(), chunk
    for i, part in enumerate(path.split(".")):
        owner = _find_owner(module, part)
        child = owner._modules[part] if owner is not None else None
        if owner is None or child is None:
            break  # a parameter or a buffer
        if part in WRAPPER_ATTRIBUTES and _is_wrapper(owner, part, child):
            levels.add(i)
        module = child
    return frozenset(levels)


def _find_owner(module: nn.Module, attribute: str) -> nn.Module | None:
    """Find the owner of a child: this module, or the one that it wraps, as some wrappers omit their level in paths."""
    if module._modules.get(attribute) is not None:
        return module
    inner = find_wrapped(module)
    return None if inner is None else _find_owner(inner, attribute)


def _is_wrapper(owner: nn.Module, attribute: str, child: nn.Module) -> bool:
    """Whether the level may be omitted: nothing else in the owner has a name that the wrapped module uses too."""
    others = _list_names(owner) - {attribute}
    return not others or others.isdisjoint(_list_visible_names(child))


def _list_visible_names(module: nn.Module) -> frozenset[str]:
    """List the names in a module; a wrapper's level is replaced by the names in the wrapped module."""
    names = _list_names(module)
    for attribute in WRAPPER_ATTRIBUTES & names:
        child = module._modules.get(attribute)
        if child is not None and _is_wrapper(module, attribute, child):
            names = (names - {attribute}) | _list_visible_names(child)
    return names


def _list_names(module: nn.Module) -> frozenset[str]:
    members = (*module._parameters.items(), *read_own_buffers(module).items(), *module._modules.items())
    return frozenset(name for name, value in members if value is not None)
