"""What TTrace uses of Accelerate 1, Lightning 2, Ray 2 and spmd_types 0.2 that they do not document.

Nothing here imports a framework: it is recognised by the names of its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_INNER_MODULES = {"lightning.fabric.wrappers._FabricModule": "_forward_module"}
"""Modules of frameworks around the one that is trained, and the attribute that holds it, since Lightning 2.0."""
_INNER_OPTIMIZERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricOptimizer": "_optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "_optimizer",
}
"""Objects that frameworks hand out in place of an optimizer, and the attribute that holds it, since Accelerate 1.0 and
Lightning 2.0."""

RAY_RUNNER = "ray.train.v2._internal.execution.worker_group.thread_runner"
"""The module with the ThreadRunner of Ray Train V2, as of Ray 2.60. Without it, Ray reports an error when TTrace ends
the loop. V1 takes exit code 0 for a good end."""


def read_spmd_types(tensor: torch.Tensor) -> tuple[Mapping[Any, Any] | None, Sequence[Any]]:
    """Read the types that spmd_types keeps of a tensor by axis, and for each dim the axes that cut it.

    `_local_type` and `_partition_spec`, in 0.2.3. Without them a tensor states no layout.
    """
    return getattr(tensor, "_local_type", None), getattr(tensor, "_partition_spec", None) or ()


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module in a framework's wrapper, or the module itself.

    The attributes are there in all versions. Without them a correct script with Fabric is accused: its module holds the
    trained one twice, and hides DDP.
    """
    inner: nn.Module = _unwrap(module, _INNER_MODULES)
    return inner


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in a framework's wrapper, or the optimizer itself.

    The attributes are there in all versions. Without them `attach` fails: a wrapper has no hooks of its own.
    """
    return _unwrap(optimizer, _INNER_OPTIMIZERS)


def _unwrap(wrapper: Any, attributes: Mapping[str, str]) -> Any:
    """Follow the attributes. Lightning's packages have two names each. See `unwrap_module`."""
    for kind in type(wrapper).__mro__:  # Lightning makes a subclass for each wrapper
        name = f"{kind.__module__}.{kind.__qualname__}".replace("lightning_fabric.", "lightning.fabric.")
        attribute = attributes.get(name.replace("pytorch_lightning.", "lightning.pytorch."))
        if attribute is not None:
            return _unwrap(getattr(wrapper, attribute), attributes)
    return wrapper


def run_training_step(method: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the training step of a strategy of Lightning as a call of the model, as strategies do that wrap the model.

    `Strategy._forward_redirection`, in all versions of Lightning 2. Without it, a reference of one process has no call
    of the whole model, and the candidate has.
    """
    model = strategy.lightning_module
    if strategy.model is not model or not hasattr(strategy, "_forward_redirection"):
        return method(strategy, *args, **kwargs)
    with strategy.precision_plugin.train_step_context():
        return strategy._forward_redirection(model, model, "training_step", *args, **kwargs)
