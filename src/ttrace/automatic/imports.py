"""Calls of functions when a framework's module is imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ttrace.patches import Patches

OnImport = Callable[[ModuleType], None]
"""A function that gets the module that was imported."""


def watch_imports(functions: Mapping[str, OnImport], patches: Patches) -> None:
    """Call the function for each module when it is imported, or at once if it already is."""
    waiting = dict(functions)
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)(sys.modules[name])
    finder = _Finder(waiting)
    sys.meta_path.insert(0, finder)
    patches.on_remove(lambda: sys.meta_path.remove(finder))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that delegates to the other finders, and calls a function after the import."""

    def __init__(self, waiting: dict[str, OnImport]) -> None:
        self._waiting = waiting

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            # Here and not in find_spec: libraries search for a module to test whether it is installed.
            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # back to the method of its class
                run(module)
                self._waiting.pop(name)(module)

            loader.exec_module = exec_module
        return spec
