"""Wrappers of models, optimizers and training steps, and names of modules and parameters without them.

Private APIs of Accelerate 1, Lightning 2, Ray 2 and spmd_types 0.2 are used here only. No framework is imported: it is
recognised by the names of its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ttrace.compat.torch import WRAPPER_ATTRIBUTES, read_own_buffers
from ttrace.layouts.ids import ROOT, encode_name

_INNER_MODULES = {"lightning.fabric.wrappers._FabricModule": "_forward_module"}
"""Modules that frameworks wrap around the trained one, and the attribute that holds it, since Lightning 2.0."""
_INNER_OPTIMIZERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricOptimizer": "_optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "_optimizer",
}
"""Objects that frameworks return in place of an optimizer, and the attribute that holds it, since Accelerate 1.0 and
Lightning 2.0."""

RAY_RUNNER = "ray.train.v2._internal.execution.worker_group.thread_runner"
"""The module with the ThreadRunner of Ray Train V2, as of Ray 2.60. Without it, Ray reports an error when TTrace ends
the loop. V1 treats exit code 0 as success."""


def find_canonical_name(path: str, chunk: nn.Module) -> str:
    """Find the name of the module or parameter at this path, without wrappers and encoded; `.` for the model itself."""
    parts = path.split(".") if path else []
    wrappers = find_wrapper_levels(path, chunk)
    return encode_name(".".join(part for i, part in enumerate(parts) if i not in wrappers)) or ROOT


def find_wrapped(module: nn.Module) -> nn.Module | None:
    """Find the module that a wrapper holds; None if this is not a wrapper."""
    return next((child for name in WRAPPER_ATTRIBUTES if (child := module._modules.get(name)) is not None), None)


def find_wrapper_levels(path: str, chunk: nn.Module) -> frozenset[int]:
    """Find the positions in a path of the levels that wrappers add."""
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


def read_spmd_types(tensor: torch.Tensor) -> tuple[Mapping[Any, Any] | None, Sequence[Any]]:
    """Read the types that spmd_types keeps for a tensor by axis, and for each dim the axes that cut it.

    `_local_type` and `_partition_spec`, in 0.2.3. Without them a tensor states no layout.
    """
    return getattr(tensor, "_local_type", None), getattr(tensor, "_partition_spec", None) or ()


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module in a framework's wrapper, or the module itself.

    The attributes are there in all versions. Without them a correct script with Fabric gets findings: its module holds
    the trained module twice, and hides DDP.
    """
    inner: nn.Module = _unwrap(module, _INNER_MODULES)
    return inner


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in a framework's wrapper, or the optimizer itself.

    The attributes are there in all versions. Without them `attach` fails: a wrapper has no hooks of its own.
    """
    return _unwrap(optimizer, _INNER_OPTIMIZERS)


def run_training_step(method: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the training step of a Lightning strategy as a call of the model, as strategies that wrap the model do.

    `Strategy._forward_redirection`, in all versions of Lightning 2. Without it, the whole model is called in the
    candidate, but not in a reference of one process.
    """
    model = strategy.lightning_module
    if strategy.model is not model or not hasattr(strategy, "_forward_redirection"):
        return method(strategy, *args, **kwargs)
    with strategy.precision_plugin.train_step_context():
        return strategy._forward_redirection(model, model, "training_step", *args, **kwargs)


def _find_owner(module: nn.Module, attribute: str) -> nn.Module | None:
    """Find the owner of a child: this module, or the module that it wraps, because some wrappers hide their level."""
    if module._modules.get(attribute) is not None:
        return module
    inner = find_wrapped(module)
    return None if inner is None else _find_owner(inner, attribute)


def _is_wrapper(owner: nn.Module, attribute: str, child: nn.Module) -> bool:
    """Return whether the level can be omitted: no other name in the owner may occur in the wrapped module."""
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


def _unwrap(wrapper: Any, attributes: Mapping[str, str]) -> Any:
    """Follow the attributes. Lightning's packages have two names each. See `unwrap_module`."""
    for kind in type(wrapper).__mro__:  # Lightning makes a subclass for each wrapper
        name = f"{kind.__module__}.{kind.__qualname__}".replace("lightning_fabric.", "lightning.fabric.")
        attribute = attributes.get(name.replace("pytorch_lightning.", "lightning.pytorch."))
        if attribute is not None:
            return _unwrap(getattr(wrapper, attribute), attributes)
    return wrapper
