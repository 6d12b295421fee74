"""Blocks that an isolated run does not need, and that the model skips.

In isolation what enters every module is generated, so the next block needs only the structure of a block's output, and
not its values. Of identical blocks the first runs and shows that structure for the others that are not wanted. The last
block of a list runs too, because its input does not show what the code after the list gets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ttrace.layouts.ids import is_inside
from ttrace.patches import Patches


class SkippedBlocks:
    """Blocks that return their input unchanged, until `remove`."""

    def __init__(self, modules: Mapping[str, nn.Module], wanted: Collection[str]) -> None:
        """Skip blocks, except those that are, contain or are part of the modules in `wanted`."""
        self._patches = Patches()
        kinds: dict[object, _ShownOutput] = {}
        skipped = []
        for name, block, is_last in _find_blocks(modules):
            kind = _describe(block)
            if kind not in kinds:
                kinds[kind] = _ShownOutput(block.forward)
                self._patches.replace(block, "forward", kinds[kind].run)
            elif not is_last and not any(is_inside(name, other) or is_inside(other, name) for other in wanted):
                self._patches.replace(block, "forward", partial(_skip, kinds[kind]))
                skipped.append(name)
        self.blocks: tuple[str, ...] = tuple(skipped)

    def is_skipped(self, name: str) -> bool:
        """Whether a module is one of the skipped blocks, or inside one."""
        return any(is_inside(name, block) for block in self.blocks)

    def remove(self) -> None:
        self._patches.remove()


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
    """Return a value with the structure of the shown output, with the block's inputs wherever the shapes agree."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def find_input(tensor: torch.Tensor) -> torch.Tensor:
        alike = (leaf for leaf in inputs if (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype))
        first = next(alike, None)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=inputs[0].device) if first is None else first

    return pytree.tree_map_only(torch.Tensor, find_input, shown.output)


def _find_blocks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Find the members of the outermost lists of modules, and whether each is the last of its list."""
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    for name in lists:
        if not any(other != name and is_inside(name, other) for other in lists):
            blocks = list(modules[name].named_children())
            yield from ((f"{name}.{key}", block, block is blocks[-1][1]) for key, block in blocks)


def _describe(block: nn.Module) -> object:
    """Describe a block by what identical blocks have in common."""
    return type(block), tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
