"""Streamed models: parameters are generated when they are read, and not stored.

A step then needs memory for one weight, its gradient and the activations only, for models of any size. The model's own
code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn

from ttrace.errors import CaptureError
from ttrace.large_references import blocks
from ttrace.large_references.parameter_source import (
    KeptValues,
    ParameterSource,
    Scratch,
    Spreads,
    StreamProgress,
    check_buffers,
    check_patterns,
    choose_distribution,
    parameters_on_meta,
)
from ttrace.large_references.streamed_tensor import Streamed

By = Literal["operators", "blocks"]
_ATTRIBUTE = "_ttrace_divided"


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
    """Replace every parameter on the meta device by one that is generated when it is read, and return the model.

    Pass a function that builds the model, so that only parameters are moved to the meta device and buffers have values.
    Attach the model without an optimizer, `ttrace.attach(ttrace.streamed(build))`: each gradient is recorded once it is
    complete, and then dropped. `spreads` gives mean and std by pattern over names (`{"*.router.weight": (0.0, 0.1)}`),
    instead of the rule in `large_references/parameter_source.py`. `by="blocks"` is for kernels that get raw addresses:
    the parameters of a block have values while it runs, and the block is recomputed in backward. `max_bytes` cuts
    larger weights of linear layers into slices, which changes the order in which input gradients are summed.
    `num_microbatches` is the number of backward passes in a step: with more than one, gradients wait for the last pass
    in temporary files. With `keep_bytes`, up to this many bytes of the latest values are kept from an operator's
    forward to its backward instead of being generated twice.
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


def read_divided(stage: nn.Module) -> frozenset[str]:
    """Return the names of modules that are divided over stages, as stored by `set_divided`."""
    names: frozenset[str] = getattr(stage, _ATTRIBUTE, frozenset())
    return names


def set_divided(stage: nn.Module, names: Iterable[str]) -> None:
    """Store the names of modules, besides the model itself, of which every stage has a part."""
    object.__setattr__(stage, _ATTRIBUTE, frozenset(names))


def _make_streamed(parameter: nn.Parameter, source: ParameterSource) -> nn.Parameter:
    geometry = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
    streamed_parameter = nn.Parameter(Streamed(geometry, source), requires_grad=parameter.requires_grad)
    vars(streamed_parameter).update(vars(parameter))  # frameworks set attributes of parameters
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
    """Make the source of each parameter on the meta device."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                owners.setdefault(parameter, []).append(module)
    if not owners:
        raise CaptureError("no parameter of this model is on the meta device, so there is nothing to stream.")
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
