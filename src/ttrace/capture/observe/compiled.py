"""Handling of torch.compile in the traced steps.

A hook inside compiled code is compiled too. Every module would be seen, but the graph breaks into dozens of pieces (29
for two layers) and is compiled again until torch gives up. So compiled code either runs eagerly while it is traced, and
every module is seen; or it stays compiled, and only its inputs and outputs are seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ttrace.capture.resolve.names import Names
from ttrace.compat.torch import COMPILED_CALL, DYNAMO, has_compiled_forward
from ttrace.patches import Patches


class Compiled:
    """The modules of a model that are compiled, and those that can be watched."""

    def __init__(self, names: Names, *, runs_eagerly: bool) -> None:
        self._runs_eagerly = runs_eagerly
        self._patches = Patches()
        self._naming = names.naming
        outermost = [(chunk, _find_outermost(chunk)) for chunk in names.chunks]
        compiled = (names.naming(chunk, path) for chunk, paths in outermost for path in paths)
        self.names = tuple(dict.fromkeys(compiled))
        if runs_eagerly:
            self.watched = list(names.modules())
        else:
            self.watched = [pair for chunk, paths in outermost for pair in self._find_boundaries(chunk, paths)]

    @property
    def opaque(self) -> tuple[str, ...]:
        """The modules whose inner modules are not observed."""
        return () if self._runs_eagerly else self.names

    def notes(self) -> list[str]:
        if not self.names:
            return []
        which = f"{len(self.names)} compiled modules, the first is {self.names[0]}"
        if self._runs_eagerly:
            return [f"torch.compile was off while tracing, so that every module is seen: {which}"]
        return [f"torch.compile was left on, so that nothing inside is seen: {which}"]

    def running(self) -> AbstractContextManager[object]:
        """Return the context in which one traced step runs."""
        # A script that called torch.compile has loaded this module already; loading it takes seconds.
        if self._runs_eagerly and DYNAMO in sys.modules:
            stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
            return stance
        return nullcontext()

    def remove(self) -> None:
        """Put back every compiled call."""
        self._patches.remove()

    def _find_boundaries(self, chunk: nn.Module, outermost: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
        """Find the modules outside of compiled code; the boundary stands in for a module with a compiled call."""
        boundaries: dict[str, nn.Module] = {}
        for path, module in chunk.named_modules():
            if not any(_is_inside(path, outer) for outer in outermost):
                boundaries[self._naming(chunk, path)] = self._wrap_compiled_call(module)
        yield from boundaries.items()

    def _wrap_compiled_call(self, module: nn.Module) -> nn.Module:
        call = vars(module).get(COMPILED_CALL)
        if call is None:
            return module
        boundary = _CallBoundary(call)
        vars(module)[COMPILED_CALL] = boundary  # setattr would register it as a submodule
        self._patches.on_remove(partial(vars(module).__setitem__, COMPILED_CALL, call))
        return boundary


class _CallBoundary(nn.Module):
    """A module around a compiled call, so that hooks run outside of the compiled code."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _find_outermost(chunk: nn.Module) -> list[str]:
    """Find the paths of compiled modules that are not inside other compiled modules."""
    outermost: list[str] = []
    for path, module in chunk.named_modules():
        if _is_compiled(module) and not any(_is_inside(path, outer) for outer in outermost):
            outermost.append(path)
    return outermost


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) or module.compile() compiled this module, or its forward is compiled."""
    if vars(module).get(COMPILED_CALL) is not None:
        return True
    return has_compiled_forward(module)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
