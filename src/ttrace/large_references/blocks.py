"""Streaming of whole blocks, for kernels that get raw addresses and so bypass operators.

A block's parameters have values while it runs. It is recomputed in backward, and each parameter keeps its values then
until its gradient is complete. Between, they read as NaN: what comes too late is loud.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import ParameterSource, set_source


def stream(model: nn.Module, sources: Mapping[nn.Parameter, ParameterSource]) -> None:
    """Put real parameters in place of those on the meta device, and let each block fill its own."""
    reals = {parameter: _make_real(parameter, source) for parameter, source in sources.items()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in reals:
                module._parameters[key] = reals[parameter]
    source_of = {reals[parameter]: source for parameter, source in sources.items()}
    blocks = list(_find_blocks(model))
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outside = [source.name for parameter, source in source_of.items() if parameter not in inside]
    if outside:
        raise CaptureError(
            f"{outside[0]} is held by a module that has blocks inside, which cannot be streamed as a block itself. "
            "Build that parameter off the meta device, or stream by operators."
        )
    frozen = _FrozenParameters()
    for block in blocks:
        owned = {parameter: source_of[parameter] for parameter in block.parameters() if parameter in source_of}
        contexts = partial(_make_contexts, frozen, owned)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


class _FrozenParameters:
    """Frozen parameters of the block that was recomputed last: no gradient shows when they are no longer needed."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def drop(self) -> None:
        for parameter in self.parameters:
            _empty(parameter)
        self.parameters.clear()


def _make_contexts(
    frozen: _FrozenParameters, owned: Mapping[nn.Parameter, ParameterSource]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the contexts in which a block runs and in which it is recomputed."""
    return _running(owned), _recomputing(frozen, owned)


@contextmanager
def _running(owned: Mapping[nn.Parameter, ParameterSource]) -> Iterator[None]:
    _fill(owned)
    try:
        yield
    finally:
        for parameter in owned:
            _empty(parameter)


@contextmanager
def _recomputing(frozen: _FrozenParameters, owned: Mapping[nn.Parameter, ParameterSource]) -> Iterator[None]:
    # Blocks run backward one after the other: when the next one begins, the last one is finished.
    frozen.drop()
    _fill(owned)
    frozen.parameters.extend(parameter for parameter in owned if not parameter.requires_grad)
    yield  # recomputation stops early, with an exception


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Find the members of the outermost lists of modules, and every other module around them that holds parameters."""
    if isinstance(module, nn.ModuleList):
        yield from (block for block in module if any(True for _ in block.parameters()))
    elif any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        for child in module.children():
            yield from _find_blocks(child)
    elif any(True for _ in module.parameters()):
        yield module


def _make_real(parameter: nn.Parameter, source: ParameterSource) -> nn.Parameter:
    made = nn.Parameter(_make_nan(source.shape, source.dtype, source.device), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    source.recomputes = True
    set_source(made, source)
    if parameter.requires_grad:
        made.register_post_accumulate_grad_hook(partial(_on_gradient, source))
    return made


def _on_gradient(source: ParameterSource, parameter: torch.Tensor) -> None:
    _empty(parameter)
    source.report_gradient(parameter)


def _fill(owned: Mapping[nn.Parameter, ParameterSource]) -> None:
    for parameter, source in owned.items():
        # Not in scratch memory: views of these values may be saved until backward.
        values = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        source.generate_run(0, source.numel, values.view(-1))
        parameter.data = values.view(parameter.shape)


def _empty(parameter: torch.Tensor) -> None:
    parameter.data = _make_nan(tuple(parameter.shape), parameter.dtype, parameter.device)


def _make_nan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
