"""Snapshot of what a training step changes, to restore it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ttrace.adapters.native.layouts import read_local_values
from ttrace.capture.observe.rng_use import save_generators
from ttrace.capture.probes.generator import is_computed
from ttrace.compat.torch import read_own_buffers


class Snapshot:
    """The state of a model, its optimizers and the random generators, at the time when this object was made.

    Generated parameters are not saved: they are generated again. Frozen ones that may keep their own values are saved,
    because scripts change those of a teacher that follows the model.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, with_parameters: bool
    ) -> None:
        modules = dict.fromkeys(module for chunk in chunks for module in chunk.modules())
        buffers = ((module, name, buffer) for module in modules for name, buffer in read_own_buffers(module).items())
        # With their modules and names: a module may put a different tensor there.
        self._buffers = [(module, name, buffer) for module, name, buffer in buffers if buffer is not None]
        tensors = [buffer for _, _, buffer in self._buffers]
        if with_parameters:
            tensors += [parameter for chunk in chunks for parameter in nn.Module.parameters(chunk)]
        else:
            tensors += [each for chunk in chunks for each in nn.Module.parameters(chunk) if _keeps_values(each)]
        self._chunks = chunks
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._optimizers = [(optimizer, _copy_state(optimizer)) for optimizer in optimizers]
        self._restore_generators = save_generators()

    def restore(self, *, keeps_gradients: bool = False) -> None:
        """Restore the state, and drop all gradients unless the caller wants to see which ones the script left."""
        with torch.no_grad():
            for tensor, values in self._tensors:
                tensor.copy_(values)
        for module, name, buffer in self._buffers:
            read_own_buffers(module)[name] = buffer
        for chunk in () if keeps_gradients else self._chunks:
            nn.Module.zero_grad(chunk)
        for optimizer, (state, options) in self._optimizers:
            optimizer.state.clear()
            # Not a deep copy of the whole state: that would copy the parameters, too.
            optimizer.state.update({parameter: copy.deepcopy(values) for parameter, values in state.items()})
            for group, old in options:
                group.update(copy.deepcopy(old))
        self._restore_generators()


def _keeps_values(parameter: nn.Parameter) -> bool:
    if parameter.requires_grad:
        return False
    return is_computed(read_local_values(parameter) if isinstance(parameter, DTensor) else parameter)


def _copy_state(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[Any, Any], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Copy the state by parameter and the options of each group, but not the parameters themselves."""
    state = {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}
    options = [
        (group, copy.deepcopy({key: option for key, option in group.items() if key != "params"}))
        for group in optimizer.param_groups
    ]
    return state, options
