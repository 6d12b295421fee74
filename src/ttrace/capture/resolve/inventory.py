"""Inventory of a model, made before anything runs."""

from __future__ import annotations

import inspect
import threading
from functools import cache

from torch import nn

from ttrace.capture.resolve.names import Names
from ttrace.compat.torch import is_dropout
from ttrace.patches import Patches
from ttrace.trace.format import ModuleInfo


def list_modules(names: Names) -> dict[str, ModuleInfo]:
    """List every module with its class, and the file and line where that class is defined."""
    kinds: dict[str, type] = {name: type(module) for name, module in names.modules()}
    return {name: _describe_class(kind) for name, kind in kinds.items()}


def switch_dropout_off(names: Names, patches: Patches) -> list[str]:
    """Set every dropout's p to 0 until the patches are removed: random masks differ between layouts.

    Return a note about it, if there is any dropout.
    """
    changed = []
    for name, module in names.modules():
        if is_dropout(module) and module.p > 0:  # type: ignore[operator]  # every dropout has it
            patches.replace(module, "p", 0.0)
            changed.append(name)
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
            patches.replace(module, "dropout", 0.0)
            changed.append(name)
        elif getattr(module, "hidden_dropout", 0.0):  # Megatron's layers apply dropout between their modules
            patches.replace(module, "hidden_dropout", 0.0)
            changed.append(name)
    return [f"dropout switched off in {len(changed)} modules, the first is {changed[0]}"] if changed else []


_parsing = threading.Lock()
"""Python 3.11 fails when two threads parse at once, and ranks may be threads."""


@cache
def _describe_class(kind: type) -> ModuleInfo:
    try:
        with _parsing:
            source = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        source = ""
    return ModuleInfo(type=f"{kind.__module__}.{kind.__qualname__}", source=source)
