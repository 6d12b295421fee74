"""Tensor without data: its values are generated for every operator that reads it, and dropped afterwards.

Autograd saves this tensor and not its values, so backward generates them again, with no hook and no recomputation.
Views and casts have no data either, and a view generates only the values that it covers. Code that calls operators can
use this tensor; kernels that get a raw address cannot (`ttrace.large_references.blocks` is for those).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ttrace.compat import torch as torch_compat
from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import ParameterSource, find_source, set_source
from ttrace.reference import split_leaves

_aten = torch.ops.aten


class Streamed(torch.Tensor):
    """A parameter, or a view or a cast of one. `geometry`, on the meta device, says which elements it has."""

    geometry: torch.Tensor
    cast_of: Streamed | None
    """The tensor that this one is a cast of."""
    leaves: dict[int, Streamed]
    """By first row, the leaves that operators use in place of the whole parameter."""

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, source: ParameterSource, cast_of: Streamed | None = None) -> Streamed:
        tensor: Streamed = torch_compat.make_wrapper_subclass(cls, geometry, source.device)
        tensor.geometry, tensor.cast_of, tensor.leaves = geometry, cast_of, {}
        set_source(tensor, source)
        return tensor

    def __init__(self, *args: Any) -> None:
        pass  # __new__ has done everything; torch.Tensor.__init__ takes no arguments

    def __repr__(self) -> str:  # type: ignore[override]  # torch's reads the values
        return f"Streamed({self.source.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def source(self) -> ParameterSource:
        source = find_source(self)
        assert source is not None
        return source

    @property
    def is_whole_parameter(self) -> bool:
        return self.is_leaf and self.cast_of is None and self.numel() == self.source.numel

    def generate(self, slot: int = 0) -> torch.Tensor:
        """Generate the values, in memory that the next operator overwrites."""
        size, stride, offset = self.geometry.size(), self.geometry.stride(), int(self.geometry.storage_offset())
        if self.cast_of is not None:
            return self.cast_of.generate(slot).to(self.geometry.dtype).as_strided(size, stride, offset)
        if self.geometry.numel() == 0:
            return torch.empty(size, dtype=self.geometry.dtype, device=self.source.device)
        num = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if num == self.source.numel and (kept := self.source.read_kept()) is not None:
            return kept.as_strided(size, stride, 0)
        memory = self.source.scratch.memory(slot, num, self.source.dtype, self.source.device)
        return self.source.generate_run(offset, offset + num, memory).as_strided(size, stride, 0)

    def part(self, start: int, stop: int) -> Streamed:
        """Return a leaf with these rows: its gradient is complete, and can be dropped, before that of the whole."""
        if start not in self.leaves:
            leaf = Streamed(self.geometry[start:stop], self.source)
            if self.requires_grad:
                leaf.requires_grad_().register_post_accumulate_grad_hook(
                    lambda leaf: self.source.report_gradient(leaf, start)
                )
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
                return Streamed(torch.empty(first.shape, dtype=kwargs["dtype"], device="meta"), first.source, first)
            if func is _aten.embedding.default and first.is_whole_parameter:
                return _look_up(first.source, args[1])
        _refuse_writes(func, args, kwargs)
        scratch = next(leaf.source.scratch for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Streamed))
        slots = count()
        args, kwargs = pytree.tree_map_only(Streamed, lambda tensor: tensor.generate(next(slots)), (args, kwargs))
        result = func(*args, **kwargs)
        # An operator may return its input, whose memory the next operator overwrites.
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if scratch.holds(t) else t, result)


def _view(func: Any, viewed: Streamed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the view; None if it does more than select elements: the caller then generates and views the values."""
    views = func(viewed.geometry, *args, **kwargs)
    if any(view.dtype != viewed.dtype or view.is_neg() or view.is_conj() for view in pytree.tree_leaves(views)):
        return None
    return pytree.tree_map_only(torch.Tensor, lambda view: Streamed(view, viewed.source, viewed.cast_of), views)


def _is_cast(tensor: Streamed, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy differs only in its dtype: autocast keeps such copies, and they must hold no data."""
    elsewhere = kwargs.get("device") not in (None, tensor.device)
    return kwargs.get("dtype") is not None and tensor.geometry.is_contiguous() and not elsewhere


def _look_up(source: ParameterSource, index: torch.Tensor) -> torch.Tensor:
    """Look up rows of a table, and generate only those: few words of a vocabulary occur."""
    rows, inverse = index.unique(return_inverse=True)
    return source.generate_rows(rows)[inverse]


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for number, argument in enumerate(torch_compat.read_arguments(func)):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if isinstance(value, Streamed) and argument.alias_info is not None and argument.alias_info.is_write:
            raise CaptureError(
                f"{value.source.name}: {func} writes to a streamed parameter, which has no memory. "
                "Initialise before ttrace.streamed, and do not step an optimizer."
            )
