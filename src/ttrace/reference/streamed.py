"""Streamed models: parameters are made when they are read, and never kept.

Memory is then one weight, its gradient, and the activations, whatever the size of the model. The model's own code runs
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from ttrace.errors import CaptureError
from ttrace.reference import blocks
from ttrace.reference.init_values import Spreads, check_patterns, spread
from ttrace.reference.meta_init import check_buffers, parameters_on_meta
from ttrace.reference.parameter_source import Maker, Scratch
from ttrace.reference.progress import StreamProgress
from ttrace.reference.streamed_tensor import Streamed

By = Literal["operators", "blocks"]


def streamed(
    model: nn.Module | Callable[[], nn.Module],
    *,
    spreads: Spreads | None = None,
    by: By = "operators",
    max_bytes: int | None = None,
    num_microbatches: int = 1,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model with every parameter that is on the meta device made anew whenever it is read, and never kept.

    Give a function that builds the model: only parameters are put on the meta device then, and buffers have values.
    Attach it without an optimizer, `ttrace.attach(ttrace.streamed(build))`: each gradient is recorded once it is
    complete, and dropped. `spreads` gives mean and std by pattern over names (`{"*.router.weight": (0.0, 0.1)}`) where
    the rule of `reference/init_values.py` is not wanted. `by="blocks"` is for kernels that are handed raw addresses:
    values are there while a block runs, which is recomputed in backward. `max_bytes` cuts the weights of larger linear
    layers into slices, whose input gradients are then summed in another order. `num_microbatches` is how many backward
    passes a step has: with more than one, gradients wait for the last in temporary files.
    """
    if not isinstance(model, nn.Module):
        with parameters_on_meta():
            model = model()
    check_buffers(model)
    makers = _makers(model, spreads or {}, max_bytes, num_microbatches, torch.device(device))
    if by == "blocks":
        blocks.stream(model, makers)
        return model
    others = {parameter: _dataless(parameter, maker) for parameter, maker in makers.items()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in others:
                module._parameters[key] = others[parameter]
    return model


def _dataless(parameter: nn.Parameter, maker: Maker) -> nn.Parameter:
    geometry = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
    made = nn.Parameter(Streamed(geometry, maker), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))  # frameworks mark parameters
    if parameter.requires_grad:
        made.register_post_accumulate_grad_hook(maker.tell)
    return made


def _makers(
    model: nn.Module, spreads: Spreads, max_bytes: int | None, num_microbatches: int, device: torch.device
) -> dict[nn.Parameter, Maker]:
    """What makes each parameter that has no values, by the parameter."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                owners.setdefault(parameter, []).append(module)
    if not owners:
        raise CaptureError("no parameter of this model is on the meta device: there is nothing to stream.")
    names = {parameter: name for name, parameter in model.named_parameters() if parameter in owners}
    check_patterns(spreads, list(names.values()))
    scratch = Scratch()
    progress = StreamProgress(sum(parameter.numel() for parameter in owners), num_microbatches)
    return {
        parameter: Maker(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            device=device,
            name=names[parameter],
            distribution=spread(names[parameter], parameter, held_by[0], spreads),
            scratch=scratch,
            progress=progress,
            num_owners=len(held_by),
            max_bytes=max_bytes,
            num_microbatches=num_microbatches,
        )
        for parameter, held_by in owners.items()
    }
