"""Results of every torch function that a module's own code calls.

They are recorded only for modules that the plan names, as each function then passes through Python twice. The n-th call
of a function in one call of a module is identified by name and number. So a candidate that also calls other functions,
for instance to communicate, is still compared call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ttrace import torch_compat
from ttrace.capture.observe.events import ModuleCall

OnResult = Callable[[ModuleCall, str, torch.Tensor], None]
_SILENT = frozenset({"__get__", "__set__", "register_hook", "detach", "backward", "requires_grad_"})
"""Functions that compute nothing."""


class FunctionCalls(TorchFunctionMode):
    """Observer of the results of functions that the named modules call, while the mode is entered."""

    def __init__(self, modules: Sequence[str], innermost: Callable[[], ModuleCall | None], on_result: OnResult) -> None:
        super().__init__()
        self._modules = frozenset(modules)
        self._innermost = innermost
        self._on_result = on_result
        self._is_paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore functions in this block, which is not the module's own code: probes compute too.

        Gradients may arrive while a module's call is still open.
        """
        outer, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = outer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = None if self._is_paused else self._innermost()
        if call is None or call.again or call.name not in self._modules:
            return result
        name = getattr(func, "__name__", "")
        if name and name not in _SILENT and _is_new(result):
            self._on_result(call, f"{name}.{call.number_of(name)}", result)
        return result


def _is_new(result: Any) -> bool:
    """Whether a function computed new numbers: the values of a view have been recorded already."""
    return isinstance(result, torch.Tensor) and result.is_floating_point() and not torch_compat.is_view(result)
