"""Streamed models: parameters are generated when they are read, and never kept.

A step then needs memory for one weight, its gradient, and the activations, whatever the size of the model. The model's
own code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from ttrace.errors import CaptureError
from ttrace.large_references import blocks
from ttrace.large_references.parameter_source import ParameterSource, Scratch
from ttrace.large_references.streamed_tensor import Streamed
from ttrace.reference.init_values import Spreads, check_patterns, choose_distribution
from ttrace.reference.kept_values import KeptValues
from ttrace.reference.meta_init import check_buffers, parameters_on_meta
from ttrace.reference.progress import StreamProgress

By = Literal["operators", "blocks"]


def streamed(
    model: nn.Module | Callable[[], nn.Module],
    *,
    spreads: Spreads | None = None,
    by: By = "operators",
    max_bytes: int | None = None,
    num_microbatches: int = 1,
    keep_bytes: int = 0,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the model with every parameter on the meta device replaced by one that is generated whenever it is read.

    Pass a function that builds the model: only parameters are then put on the meta device, and buffers have values.
    Attach the model without an optimizer, `ttrace.attach(ttrace.streamed(build))`: each gradient is recorded once it is
    complete, and then dropped. `spreads` gives mean and std by pattern over names (`{"*.router.weight": (0.0, 0.1)}`),
    in place of the rule in `reference/init_values.py`. `by="blocks"` is for kernels that get raw addresses: the
    parameters of a block have values while it runs, and the block is recomputed in backward. `max_bytes` cuts the
    weights of larger linear layers into slices, whose input gradients are then summed in another order.
    `num_microbatches` is the number of backward passes in a step: with more than one, gradients wait for the last pass
    in temporary files. With `keep_bytes`, so many bytes of the latest values are kept from an operator's forward to its
    backward, and not generated twice.
    """
    if not isinstance(model, nn.Module):
        with parameters_on_meta():
            model = model()
    check_buffers(model)
    device = torch.empty((), dtype=torch.uint8, device=device).device  # with its index, which autograd needs
    scratch = Scratch(KeptValues(keep_bytes) if keep_bytes else None)
    sources = _make_sources(model, spreads or {}, max_bytes, num_microbatches, scratch, device)
    if by == "blocks":
        blocks.stream(model, sources)
        return model
    others = {parameter: _make_streamed(parameter, source) for parameter, source in sources.items()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in others:
                module._parameters[key] = others[parameter]
    return model


def _make_streamed(parameter: nn.Parameter, source: ParameterSource) -> nn.Parameter:
    geometry = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
    streamed_parameter = nn.Parameter(Streamed(geometry, source), requires_grad=parameter.requires_grad)
    vars(streamed_parameter).update(vars(parameter))  # frameworks mark parameters
    if parameter.requires_grad:
        streamed_parameter.register_post_accumulate_grad_hook(source.report_gradient)
    return streamed_parameter


def _make_sources(
    model: nn.Module,
    spreads: Spreads,
    max_bytes: int | None,
    num_microbatches: int,
    scratch: Scratch,
    device: torch.device,
) -> dict[nn.Parameter, ParameterSource]:
    """Make the source of each parameter that has no values."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                owners.setdefault(parameter, []).append(module)
    if not owners:
        raise CaptureError("no parameter of this model is on the meta device: there is nothing to stream.")
    names = {parameter: name for name, parameter in model.named_parameters() if parameter in owners}
    check_patterns(spreads, list(names.values()))
    progress = StreamProgress(sum(parameter.numel() for parameter in owners), num_microbatches)
    return {
        parameter: ParameterSource(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            device=device,
            name=names[parameter],
            distribution=choose_distribution(names[parameter], parameter, modules[0], spreads),
            scratch=scratch,
            progress=progress,
            num_owners=len(modules),
            max_bytes=max_bytes,
            num_microbatches=num_microbatches,
        )
        for parameter, modules in owners.items()
    }
