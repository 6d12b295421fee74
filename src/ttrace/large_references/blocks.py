"""Blocks of large references: streaming of whole blocks, and blocks that an isolated run skips.

`stream` is for kernels that get raw addresses and so bypass operators. A block's parameters have values while it runs.
It is recomputed in backward, and then each parameter has values until its gradient is complete. At all other times
parameters are NaN, so that a late access shows up.

`SkippedBlocks` skips the blocks that an isolated run does not need. In isolation the inputs of every module are
generated, so only the structure of a block's output matters, not its values. The first of several identical blocks runs
and shows this structure; the others are skipped unless they are wanted. The last block of a list runs too, because the
input of the code after the list is not known otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import ParameterSource, set_source
from ttrace.layouts.ids import is_inside
from ttrace.patches import Patches


def stream(model: nn.Module, sources: Mapping[nn.Parameter, ParameterSource]) -> None:
    """Replace parameters on the meta device by real ones, which their block fills while it runs."""
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
            f"{outside[0]} belongs to a module that contains blocks, so it cannot be streamed as part of a block. "
            "Build this parameter on a real device, or stream by operators."
        )
    frozen = _FrozenParameters()
    for block in blocks:
        owned = {parameter: source_of[parameter] for parameter in block.parameters() if parameter in source_of}
        contexts = partial(_make_contexts, frozen, owned)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


class SkippedBlocks:
    """Blocks that are skipped until `remove`: they return their input."""

    def __init__(self, modules: Mapping[str, nn.Module], wanted: Collection[str]) -> None:
        """Skip blocks, except those that contain or are part of a module in `wanted`."""
        self._patches = Patches()
        kinds: dict[object, _ShownOutput] = {}
        skipped = []
        for name, block, is_last in _list_blocks(modules):
            kind = _describe(block)
            if kind not in kinds:
                kinds[kind] = _ShownOutput(block.forward)
                self._patches.replace(block, "forward", kinds[kind].run)
            elif not is_last and not any(is_inside(name, other) or is_inside(other, name) for other in wanted):
                self._patches.replace(block, "forward", partial(_skip, kinds[kind]))
                skipped.append(name)
        self.blocks: tuple[str, ...] = tuple(skipped)

    def is_skipped(self, name: str) -> bool:
        """Return whether a module is a skipped block, or is inside one."""
        return any(is_inside(name, block) for block in self.blocks)

    def remove(self) -> None:
        self._patches.remove()


class _FrozenParameters:
    """The frozen parameters of the block that was recomputed last. No gradient marks their last use."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def drop(self) -> None:
        for parameter in self.parameters:
            _empty(parameter)
        self.parameters.clear()


def _make_contexts(
    frozen: _FrozenParameters, owned: Mapping[nn.Parameter, ParameterSource]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the contexts for running a block and for recomputing it."""
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
    # Blocks run backward one at a time: when one begins, the previous one is finished.
    frozen.drop()
    _fill(owned)
    frozen.parameters.extend(parameter for parameter in owned if not parameter.requires_grad)
    yield  # recomputation is stopped early by an exception


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost module lists, and every other module that has parameters."""
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
        # Scratch memory is not used, because views of these values may be saved until backward.
        values = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        source.generate_run(0, source.numel, values.view(-1))
        parameter.data = values.view(parameter.shape)


def _empty(parameter: torch.Tensor) -> None:
    parameter.data = _make_nan(tuple(parameter.shape), parameter.dtype, parameter.device)


def _make_nan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


class _ShownOutput:
    """The last output of the first of several identical blocks."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.output: Any = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        self.output = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("meta"), output)
        return output


def _skip(shown: _ShownOutput, *args: Any, **kwargs: Any) -> Any:
    """Return a value with the structure of the shown output, made of the block's inputs where their shapes match."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def find_input(tensor: torch.Tensor) -> torch.Tensor:
        alike = (leaf for leaf in inputs if (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype))
        first = next(alike, None)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=inputs[0].device) if first is None else first

    return pytree.tree_map_only(torch.Tensor, find_input, shown.output)


def _list_blocks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the members of the outermost module lists, and whether each is the last of its list."""
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    for name in lists:
        if not any(other != name and is_inside(name, other) for other in lists):
            blocks = list(modules[name].named_children())
            yield from ((f"{name}.{key}", block, block is blocks[-1][1]) for key, block in blocks)


def _describe(block: nn.Module) -> object:
    """Return a key that is equal for identical blocks."""
    return type(block), tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
