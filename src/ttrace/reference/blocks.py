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
from ttrace.reference.parameter_source import Maker, set_maker


def stream(model: nn.Module, makers: Mapping[nn.Parameter, Maker]) -> None:
    """Put real parameters in place of those on the meta device, and have each block make its own."""
    reals = {parameter: _real(parameter, maker) for parameter, maker in makers.items()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in reals:
                module._parameters[key] = reals[parameter]
    made = {reals[parameter]: maker for parameter, maker in makers.items()}
    found = list(_blocks(model))
    inside = {parameter for block in found for parameter in block.parameters()}
    lost = [maker.name for parameter, maker in made.items() if parameter not in inside]
    if lost:
        raise CaptureError(
            f"{lost[0]} is held by a module that has blocks inside, which cannot be streamed as a block itself. "
            "Build that parameter off the meta device, or stream by operators."
        )
    kept = _Kept()
    for block in found:
        owned = {parameter: made[parameter] for parameter in block.parameters() if parameter in made}
        both = partial(_both, kept, owned)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=both)


class _Kept:
    """Frozen parameters that have values since their block was recomputed: no gradient will tell that it is through."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def drop(self) -> None:
        for parameter in self.parameters:
            _empty(parameter)
        self.parameters.clear()


def _both(
    kept: _Kept, owned: Mapping[nn.Parameter, Maker]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What to be in while a block runs, and while it is recomputed."""
    return _running(owned), _recomputing(kept, owned)


@contextmanager
def _running(owned: Mapping[nn.Parameter, Maker]) -> Iterator[None]:
    _fill(owned)
    try:
        yield
    finally:
        for parameter in owned:
            _empty(parameter)


@contextmanager
def _recomputing(kept: _Kept, owned: Mapping[nn.Parameter, Maker]) -> Iterator[None]:
    # Blocks run backward one after the other: who is next says that the last one is through.
    kept.drop()
    _fill(owned)
    kept.parameters.extend(parameter for parameter in owned if not parameter.requires_grad)
    yield  # recomputation stops early, by an exception


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules, and every other module around them that holds parameters."""
    if isinstance(module, nn.ModuleList):
        yield from (block for block in module if any(True for _ in block.parameters()))
    elif any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        for child in module.children():
            yield from _blocks(child)
    elif any(True for _ in module.parameters()):
        yield module


def _real(parameter: nn.Parameter, maker: Maker) -> nn.Parameter:
    made = nn.Parameter(_nothing(maker.shape, maker.dtype, maker.device), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    maker.recomputes = True
    set_maker(made, maker)
    if parameter.requires_grad:
        made.register_post_accumulate_grad_hook(partial(_arrived, maker))
    return made


def _arrived(maker: Maker, parameter: torch.Tensor) -> None:
    _empty(parameter)
    maker.tell(parameter)


def _fill(owned: Mapping[nn.Parameter, Maker]) -> None:
    for parameter, maker in owned.items():
        # Not in scratch memory: views of these values may be saved until backward.
        values = torch.empty(maker.shape, dtype=maker.dtype, device=maker.device)
        maker.run(0, maker.numel, values.view(-1))
        parameter.data = values.view(parameter.shape)


def _empty(parameter: torch.Tensor) -> None:
    parameter.data = _nothing(tuple(parameter.shape), parameter.dtype, parameter.device)


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
