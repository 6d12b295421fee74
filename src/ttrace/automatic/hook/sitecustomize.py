"""Python imports this file when it starts, in every process of a command that `ttrace` launched.

When the script has imported torch, it starts to watch for a training step. Processes that never import torch are not
affected. TTrace is not imported before, because a process may run in an environment without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_FOLDER = str(pathlib.Path(__file__).parent)
_PLAN, _MARK = "TTRACE_PLAN", "TTRACE_HOOKED"


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finder that lets the other finders find torch, and starts the watch when torch has been imported."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            # Here and not in find_spec: libraries search for torch to test whether it is installed.
            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # back to the method of its class
                sys.meta_path.remove(self)
                run(module)
                _start()

            loader.exec_module = exec_module
        return spec


def _start() -> None:
    try:
        from ttrace.automatic.installation import install
    except ImportError:  # a separate environment without TTrace
        return
    install()


def _run_users_own() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [folder for folder in sys.path if folder != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get(_PLAN):
    if mark := os.environ.get(_MARK):
        pathlib.Path(mark).touch()
    sys.meta_path.insert(0, _AfterTorch())
_run_users_own()
