"""APIs of torchtitan, all in one place.

Each entry names the version in which it was seen, and what happens without it. torchtitan is not imported: a script
that uses it has done so. Launchers import this file, so it stays light.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

TRAINER = "torchtitan.trainer"
"""The module of `Trainer`, whose first argument is its configuration; in 0.3. Without it types stay as they are."""
TYPES = "spmd_types"
"""The value of `parallelism.spmd_backend` with which tensors have types instead of being DTensors; in 0.3, the default.
Without it layouts are those of DTensors."""


def is_model(module: nn.Module) -> bool:
    """Return whether this is a model of torchtitan: by its class, in 0.3. Without it a model is treated as plain."""
    return any(kind.__module__.startswith("torchtitan.") for kind in type(module).__mro__)


HEAD = "lm_head"
"""The module that a chunked loss calls for each chunk of a sequence; in 0.3. Without it its calls are compared, and
reported as wrong where chunks have different tokens."""


def has_chunked_loss(model: nn.Module) -> bool:
    """Return whether a chunked loss calls the model's head: `_skip_lm_head`, in 0.3. Without it, it does not."""
    return bool(getattr(model, "_skip_lm_head", False))


def find_chunked_loss() -> type[Any] | None:
    """Return the class of chunked losses: `components.loss.ChunkedLossWrapper`, in 0.3.

    Without it the first chunk's loss is recorded as the loss of the microbatch.
    """
    return getattr(sys.modules.get("torchtitan.components.loss"), "ChunkedLossWrapper", None)


def is_typed() -> bool:
    """Return whether layouts are kept as types: `distributed.utils.get_spmd_backend`, in 0.3. Without it, no."""
    read = getattr(sys.modules.get("torchtitan.distributed.utils"), "get_spmd_backend", None)
    return read is not None and read() == TYPES


def find_typed_mesh() -> DeviceMesh | None:
    """Return the mesh that types refer to: `distributed.spmd_types.spmd_dense_mesh`, in 0.3, known in a step.

    Without it, context parallelism cannot be distinguished from data parallelism: parameters have one axis for both.
    """
    find = getattr(sys.modules.get("torchtitan.distributed.spmd_types"), "spmd_dense_mesh", None)
    if find is None or not is_typed():
        return None
    with suppress(AssertionError):  # before the first step
        mesh: DeviceMesh = find()
        return mesh
    return None


def is_checking_types() -> bool:
    """Return whether tensors get types now: `spmd_types.is_type_checking`, in 0.2.3. Without it, they do not."""
    check = getattr(sys.modules.get(TYPES), "is_type_checking", None)
    return check is not None and bool(check())


def check_types(config: Any) -> None:
    """Enable type checking if tensors are cut and the configuration allows it: `debug.spmd_typechecking`, in 0.3.

    Without it a run with tensor or context parallelism is refused. With context parallelism, the checker of 0.2.3
    supports only chunked losses, and would fail in a correct run.
    """
    parallelism, debug = config.parallelism, config.debug
    degrees = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
    is_cut = any(getattr(parallelism, degree, 1) > 1 for degree in degrees)
    is_known = parallelism.context_parallel_degree == 1 or "ChunkedLossWrapper" in type(config.loss).__qualname__
    if not is_cut or not is_known or getattr(parallelism, "spmd_backend", "") != TYPES:
        return
    own, debug.spmd_typechecking = debug.spmd_typechecking, True
    try:
        config.__post_init__()  # it refuses configurations that it cannot check
    except ValueError:
        debug.spmd_typechecking = own
