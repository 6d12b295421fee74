"""Snapshots of a package's functions, classes and methods, to see whether a patch was left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

_MISSING = object()


class Attributes:
    """A snapshot of the attributes of some packages' modules, their classes and the given objects."""

    def __init__(self, packages: Iterable[str], objects: Iterable[object] = ()) -> None:
        loaded = [(name, module) for name, module in list(sys.modules.items()) if name.split(".")[0] in set(packages)]
        owners: dict[int, tuple[str, Any]] = {}
        for name, module in loaded:
            if isinstance(module, ModuleType):
                owners[id(module)] = name, module
                for key, value in list(vars(module).items()):
                    if issubclass(type(value), type) and value.__module__.split(".")[0] in set(packages):
                        owners.setdefault(id(value), (f"{name}.{key}", value))
        owners |= {id(one): (type(one).__name__, one) for one in objects}
        self._held = [(name, owner, dict(vars(owner))) for name, owner in owners.values()]
        functions = [v for _, _, held in self._held for v in held.values() if type(v) is FunctionType]
        cells = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
        self._cells = [(cell, _contents(cell)) for cell in cells.values()]

    def changes(self) -> Iterator[str]:
        """Yield the names of attributes that were replaced, removed or added since."""
        for name, owner, before in self._held:
            now = vars(owner)
            for key in {**before, **now}:
                old, new = before.get(key, _MISSING), now.get(key, _MISSING)
                if old is not new and _counts(owner, old, new):
                    yield f"{name}.{key}"
        yield from (f"a closure of {before}" for cell, before in self._cells if _contents(cell) is not before)


def _counts(owner: object, old: object, new: object) -> bool:
    """Whether a change may be a patch: modules also load other modules, cache values and count by themselves."""
    if isinstance(owner, nn.Module):
        return True
    if isinstance(owner, ModuleType) and (old is _MISSING or old is None):
        return callable(new) and getattr(new, "__module__", "").startswith("ttrace")
    return callable(old) or callable(new)


def _contents(cell: CellType) -> object:
    try:
        value = cell.cell_contents
    except ValueError:
        return None
    return value if callable(value) else None
