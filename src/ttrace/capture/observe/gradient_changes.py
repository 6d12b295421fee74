"""What a script does to gradients: functions and collectives that change them after the backward pass, or in hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ttrace.compat import torch as torch_compat
from ttrace.trace.format import Operation

_MOST = 64
"""Parameters that are watched, those of accused modules first: each function of the script is held against them."""


class GradientChanges:
    """Observer of the changes of some parameters' gradients.

    Those of parameters that are not accused show what is usual: a change that only one has, or that only one lacks.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(list(parameters.items())[:_MOST])
        self._found: dict[str, dict[Operation, None]] = {}

    @property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """By parameter, the changes of its gradient, in order; those of one line once."""
        return {name: tuple(found) for name, found in self._found.items()}

    def on_function(self, name: str, source: str, taken: Any, result: Any) -> None:
        """Keep a function that changes a gradient in place or, in a hook, makes another one of it."""
        if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
            self._keep(name, source, self._find_holders(_list_tensors(taken)))
        elif _list_tensors(result):
            self._keep(name, source, self._find_arriving())

    def on_collective(self, name: str, source: str, order: int, tensors: list[torch.Tensor]) -> None:
        """Keep a collective that changes a gradient."""
        self._keep(name, source, {*self._find_holders(tensors), *self._find_arriving()}, (order,))

    def _keep(self, name: str, source: str, parameters: Any, collectives: tuple[int, ...] = ()) -> None:
        for parameter in parameters if source else ():
            change = Operation(slot=f"{name}.0", source=source, collectives=collectives)
            found = self._found.setdefault(parameter, {})
            found.pop(change, None)  # the last time counts
            found[change] = None

    def _find_holders(self, tensors: list[torch.Tensor]) -> Iterator[str]:
        """Find the parameters whose gradients lie in the memory of a tensor."""
        memory = {torch_compat.read_memory(_to_local(tensor)) for tensor in tensors} - {0}
        for name, parameter in self._parameters.items() if memory else ():
            if parameter.grad is not None and torch_compat.read_memory(_to_local(parameter.grad)) in memory:
                yield name

    def _find_arriving(self) -> Iterator[str]:
        """Find the parameter whose gradient arrives: its hooks run, and it does not hold the gradient yet."""
        arriving = torch_compat.read_arriving()
        return (name for name, parameter in self._parameters.items() if parameter is arriving)


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
