"""Tensor without data: its values are made for every operator that reads it, and dropped afterwards.

Autograd saves this tensor and not its values, so they are made again in backward, with no hook and no recomputation.
Views and casts have no data either, and a view's values are only those that it touches. Whatever calls operators can
use it; kernels that are handed a raw address cannot (`ttrace.reference.blocks` is for those).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ttrace import torch_compat
from ttrace.errors import CaptureError
from ttrace.reference import split_leaves
from ttrace.reference.parameter_source import Maker, maker_of, set_maker

_aten = torch.ops.aten


class Streamed(torch.Tensor):
    """A parameter, a view or a cast of one. `geometry`, on the meta device, says which."""

    geometry: torch.Tensor
    source: Streamed | None
    """What this is a cast of."""
    leaves: dict[int, Streamed]
    """By first row, the leaves that a parameter is used as where it is not used as a whole."""

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, maker: Maker, source: Streamed | None = None) -> Streamed:
        made: Streamed = torch_compat.make_wrapper_subclass(cls, geometry, maker.device)
        made.geometry, made.source, made.leaves = geometry, source, {}
        set_maker(made, maker)
        return made

    def __init__(self, *args: Any) -> None:
        pass  # all is done; torch.Tensor would take no arguments

    def __repr__(self) -> str:  # type: ignore[override]  # torch's reads the values
        return f"Streamed({self.maker.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def maker(self) -> Maker:
        found = maker_of(self)
        assert found is not None
        return found

    @property
    def is_whole_parameter(self) -> bool:
        return self.is_leaf and self.source is None and self.numel() == self.maker.numel

    def made(self, slot: int = 0) -> torch.Tensor:
        """The values, in memory that the next operator overwrites."""
        size, stride, offset = self.geometry.size(), self.geometry.stride(), int(self.geometry.storage_offset())
        if self.source is not None:
            return self.source.made(slot).to(self.geometry.dtype).as_strided(size, stride, offset)
        if self.geometry.numel() == 0:
            return torch.empty(size, dtype=self.geometry.dtype, device=self.maker.device)
        num = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        memory = self.maker.scratch.memory(slot, num, self.maker.dtype, self.maker.device)
        return self.maker.run(offset, offset + num, memory).as_strided(size, stride, 0)

    def part(self, start: int, stop: int) -> Streamed:
        """A leaf that is these rows: its gradient is complete, and can be dropped, before that of the whole is."""
        if start not in self.leaves:
            leaf = Streamed(self.geometry[start:stop], self.maker)
            if self.requires_grad:
                leaf.requires_grad_().register_post_accumulate_grad_hook(lambda leaf: self.maker.tell(leaf, start))
            self.leaves[start] = leaf
        assert self.leaves[start].shape[0] == stop - start, "a parameter is cut in one way"
        return self.leaves[start]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = split_leaves.USES.get(func, func)
        with torch_compat.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function where it means a method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Streamed):
            is_view = func.is_view or func is _aten.detach.default
            if is_view and (view := _view(func, first, args[1:], kwargs)) is not None:
                return view
            if func is torch_compat.TO_COPY and _is_cast(first, kwargs):
                return Streamed(torch.empty(first.shape, dtype=kwargs["dtype"], device="meta"), first.maker, first)
            if func is _aten.embedding.default and first.is_whole_parameter:
                return _looked_up(first.maker, args[1])
        _refuse_writes(func, args, kwargs)
        scratch = next(leaf.maker.scratch for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Streamed))
        slots = count()
        args, kwargs = pytree.tree_map_only(Streamed, lambda tensor: tensor.made(next(slots)), (args, kwargs))
        result = func(*args, **kwargs)
        # An operator may return its input, and that memory is about to be overwritten.
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if scratch.holds(t) else t, result)


def _view(func: Any, viewed: Streamed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The view, or None if it changes more than which elements there are: they are then made and viewed."""
    views = func(viewed.geometry, *args, **kwargs)
    if any(view.dtype != viewed.dtype or view.is_neg() or view.is_conj() for view in pytree.tree_leaves(views)):
        return None
    return pytree.tree_map_only(torch.Tensor, lambda view: Streamed(view, viewed.maker, viewed.source), views)


def _is_cast(tensor: Streamed, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy differs in its dtype alone: autocast keeps such copies, and they must hold no data."""
    elsewhere = kwargs.get("device") not in (None, tensor.device)
    return kwargs.get("dtype") is not None and tensor.geometry.is_contiguous() and not elsewhere


def _looked_up(maker: Maker, index: torch.Tensor) -> torch.Tensor:
    """Rows of a table; of a vocabulary few words occur."""
    found, inverse = index.unique(return_inverse=True)
    return maker.rows(found)[inverse]


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for number, argument in enumerate(torch_compat.read_arguments(func)):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if isinstance(value, Streamed) and argument.alias_info is not None and argument.alias_info.is_write:
            raise CaptureError(
                f"{value.maker.name}: {func} writes to a streamed parameter, which has no memory. "
                "Initialise before ttrace.streamed, and do not step an optimizer."
            )
