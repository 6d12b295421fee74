"""Private APIs of DeepSpeed, all in one place.

Each entry names the versions in which it was seen, and what happens without it. DeepSpeed is not imported: an engine is
recognised by the name of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
"""The class of engines. Without it none is recognised."""
STEP = "_take_model_step"
"""The engine's method that clips and steps, called when all microbatches of a step were run; in 0.19. Without it
gradients could be read only after they are clipped."""
CLIP = "clip_grad_norm_"
"""The function of deepspeed.runtime.engine that clips without ZeRO; in 0.19. Without it the norm is missing."""
UNSCALE = "unscale_and_clip_grads"
"""The method of DeepSpeed's optimizers that clips by `total_norm`; in 0.19. Without it the norm is missing."""


def is_engine(module: nn.Module) -> bool:
    """Return whether this is an engine of DeepSpeed: its class, in 0.19. Without it a model is treated as plain."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == ENGINE for kind in type(module).__mro__)


def divides_behind_the_loss(engine: Any) -> bool:
    """Return whether the engine divides by its accumulation steps in hooks on its outputs, and not the loss itself.

    `_scale_wrt_gas`, in 0.18.4 to 0.19.5. Without it the loss of a correct engine is reported as wrong.
    """
    return bool(getattr(engine, "_scale_wrt_gas", False)) and engine.gradient_accumulation_steps() > 1


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO-3 has partitioned a parameter, so that it is empty unless its module runs.

    `ds_tensor`, in 0.19. Without it ZeRO-3 cannot be recorded.
    """
    return hasattr(parameter, "ds_tensor")


def read_partition(parameter: nn.Parameter) -> tuple[torch.Tensor, tuple[int, int]]:
    """Read this rank's part of a ZeRO-3 parameter, without padding, and its run in the flattened parameter.

    `ds_tensor`, `ds_numel` and `ds_process_group`, in 0.19. Without them ZeRO-3 cannot be recorded.
    """
    partition: Any = parameter
    size = partition.ds_tensor.numel()
    begin = min(torch.distributed.get_rank(partition.ds_process_group) * size, partition.ds_numel)
    end = min(begin + size, partition.ds_numel)
    return partition.ds_tensor.data[: end - begin], (begin, end)


def read_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Read the shape of a whole parameter of ZeRO-3: `ds_shape`, in 0.19. Without it its layout is not known."""
    partition: Any = parameter
    return tuple(partition.ds_shape)


def release(parameter: nn.Parameter) -> None:
    """Release the gathered values that ZeRO-3 keeps of a small parameter, so that they are gathered again.

    `partition`, which ZeRO-3 adds to every parameter, in 0.19. Without it small parameters keep old values.
    """
    partition: Any = parameter
    if partition.ds_status.name == "AVAILABLE":
        partition.partition()


def has_fragment(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO-1, ZeRO-2 or the optimizer for bf16 keeps a flat copy that contains this parameter.

    `_hp_mapping`, in 0.19. Without it gradients are missing, because ZeRO keeps them elsewhere.
    """
    return hasattr(parameter, "_hp_mapping")


def read_fragment(parameter: nn.Parameter) -> Any:
    """Read the place of this parameter's run in this rank's flat copy; None if another rank has it.

    `_hp_mapping`, in 0.19. Without it gradients and optimizer states of ZeRO-1 and ZeRO-2 cannot be recorded.
    """
    return getattr(parameter, "_hp_mapping", None)


def read_fragment_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Read the reduced gradient of this rank's run of a parameter, flat; None before it exists.

    `tensor_fragment.get_lp_grad_fragment`, in 0.19. Without it gradients of ZeRO-1 and ZeRO-2 are missing.
    """
    mapping, given = read_fragment(parameter), getattr(parameter, "_index_in_param_group", 0)
    try:
        gradient: torch.Tensor | None = mapping.get_lp_grad_fragment(given)
    except (ValueError, IndexError):  # an unused parameter has none
        return None
    if gradient is None:
        return None
    flat, address = gradient.detach().flatten(), mapping.lp_fragment_address
    # The optimizer for bf16 has the whole gradient on every rank.
    return flat if flat.numel() == address.numel else flat[address.start : address.start + address.numel]


def list_groups(zero: Any) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """List the parameters of an optimizer of ZeRO, each with its group of the inner optimizer.

    `bit16_groups`, or `fp16_groups` and `sub_group_to_group_id` of ZeRO-3, in 0.19. Without them settings are not
    compared.
    """
    groups: Sequence[dict[str, Any]] = zero.optimizer.param_groups
    numbers = getattr(zero, "sub_group_to_group_id", None)
    parts = getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None) or ()
    for number, parameters in enumerate(parts):
        group = groups[number if numbers is None else numbers[number]]
        yield from ((parameter, group) for parameter in parameters)


def find_copy(zero: Any, parameter: nn.Parameter) -> torch.Tensor | None:
    """Find the fp32 copy that DeepSpeed keeps of a parameter without ZeRO; None if it keeps none.

    `fp16_groups` and `fp32_groups` of FP16_UnfusedOptimizer, in 0.19. Without them states are not recorded.
    """
    pairs = zip(getattr(zero, "fp16_groups", ()), getattr(zero, "fp32_groups", ()), strict=False)
    copies = (copy for ours, theirs in pairs for own, copy in zip(ours, theirs, strict=True) if own is parameter)
    return next(copies, None)


def read_flat_state(zero: Any, parameter: nn.Parameter) -> tuple[dict[str, Any], int, int]:
    """Read the state that the inner optimizer keeps for the flat copy with this parameter, and the run in that copy.

    `_hp_mapping.param_group_index` and `single_partition_of_fp32_groups` (`fp32_groups_flat_partition` of the optimizer
    for bf16), or `grad_position` and `fp32_partitioned_groups_flat` of ZeRO-3, in 0.19. Without them states of
    optimizers are missing.
    """
    if is_partitioned(parameter):
        number, begin, size = zero.grad_position[zero.get_param_id(parameter)]
        flat = zero.fp32_partitioned_groups_flat[number]
    else:
        mapping = read_fragment(parameter)
        number, begin, size = (
            mapping.param_group_index,
            mapping.hp_fragment_address.start,
            mapping.hp_fragment_address.numel,
        )
        flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
        flat = flats[number]
    return zero.optimizer.state.get(flat, {}), begin, size
