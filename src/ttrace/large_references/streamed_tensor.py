"""Tensor without data: its values are generated for every operator that reads it, and dropped afterwards.

Autograd saves this tensor instead of its values, so backward generates them again, without hooks or recomputation.
Views and casts have no data either, and a view generates only its own values. Code that calls operators can use this
tensor. Kernels that get a raw address cannot; `ttrace.large_references.blocks` is for them.

Some functions of torch are replaced (`USES`) where one gradient would be larger than the values that were used. A
weight with all experts would get a dense gradient from every expert, and an embedding one with a row for each token of
the vocabulary. So single experts are separate leaves, an embedding's gradient has only the rows that occurred, and a
weight above a given size is used slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ttrace.compat import torch as torch_compat
from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import ParameterSource, find_source, set_source

_aten = torch.ops.aten
_EXPERT_DIMS = 3
"""An indexed parameter with at least this many dims has one matrix for each expert."""
_own_item, _own_unbind = torch.Tensor.__getitem__, torch.Tensor.unbind
_own_embedding, _own_linear = F.embedding, F.linear


class Streamed(torch.Tensor):
    """A parameter, or a view or a cast of one. `geometry`, on the meta device, describes its elements."""

    geometry: torch.Tensor
    cast_of: Streamed | None
    """The tensor that was cast to this one."""
    leaves: dict[int, Streamed]
    """For each first row, the leaf that operators use instead of the whole parameter."""

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, source: ParameterSource, cast_of: Streamed | None = None) -> Streamed:
        tensor: Streamed = torch_compat.make_wrapper_subclass(cls, geometry, source.device)
        tensor.geometry, tensor.cast_of, tensor.leaves = geometry, cast_of, {}
        set_source(tensor, source)
        return tensor

    def __init__(self, *args: Any) -> None:
        pass  # __new__ does everything, and torch.Tensor.__init__ takes no arguments

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
        """Return a leaf with these rows, whose gradient is complete and can be dropped before that of the whole."""
        if start not in self.leaves:
            leaf = Streamed(self.geometry[start:stop], self.source)
            if self.requires_grad:
                leaf.requires_grad_().register_post_accumulate_grad_hook(
                    lambda leaf: self.source.report_gradient(leaf, start)
                )
            self.leaves[start] = leaf
        assert self.leaves[start].shape[0] == stop - start, "a parameter is always cut into the same parts"
        return self.leaves[start]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = USES.get(func, func)
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


def item(tensor: Any, index: Any) -> Any:
    """Replacement of tensor[index] that uses single experts as leaves."""
    number = _find_row(index)
    if number is None or not _holds_experts(tensor) or not -tensor.shape[0] <= number < tensor.shape[0]:
        return _own_item(tensor, index)
    row = number % tensor.shape[0]
    return tensor.part(row, row + 1).squeeze(0)


def unbind(tensor: Any, dim: int = 0) -> Any:
    """Replacement of tensor.unbind(dim) that uses single experts as leaves."""
    if dim != 0 or not _holds_experts(tensor):
        return _own_unbind(tensor, dim)
    return tuple(tensor.part(row, row + 1).squeeze(0) for row in range(tensor.shape[0]))


def embedding(input: torch.Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # torch's name
    """Replacement of F.embedding whose gradient has only the rows that occurred."""
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    if options.get("max_norm") or options.get("scale_grad_by_freq") or not _is_parameter(weight):
        return _own_embedding(input, weight, **options)
    return _Lookup.apply(weight, input, options.get("padding_idx"))  # type: ignore[no-untyped-call]  # torch's own


class _Lookup(torch.autograd.Function):
    """Lookup of rows in a table. Torch's sparse gradient has a row for each token, and its sums round differently."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, index: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.padding = weight.shape, padding
        return _own_embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        index, rows = index.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:
            kept = index != ctx.padding % ctx.shape[0]
            index, rows = index[kept], rows[kept]
        return sum_rows(index, rows, ctx.shape), None, None


def sum_rows(index: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum rows with equal indices with the kernel of dense gradients, as others round more; return a sparse tensor."""
    distinct, inverse = index.unique(return_inverse=True)
    total = torch.ops.aten.embedding_dense_backward(rows, inverse, distinct.numel(), -1, False)
    return torch.sparse_coo_tensor(distinct[None], total, shape, is_coalesced=True, check_invariants=False)


def linear(input: torch.Tensor, weight: Any, bias: Any = None) -> Any:  # noqa: A002  # torch's name
    """Replacement of F.linear that computes the output in slices if the weight is larger than `max_bytes`."""
    limit = weight.source.max_bytes if _is_parameter(weight) else None
    if limit is None or weight.nbytes <= limit or weight.source.num_owners > 1:
        return _own_linear(input, weight, bias)
    num_rows = max(1, limit // (weight.nbytes // weight.shape[0]))
    cuts = [(at, min(at + num_rows, weight.shape[0])) for at in range(0, weight.shape[0], num_rows)]
    slices = [_own_linear(input, weight.part(*cut), None if bias is None else bias[slice(*cut)]) for cut in cuts]
    return torch.cat(slices, dim=-1)


USES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: item,
    torch.Tensor.__iter__: lambda tensor: iter(unbind(tensor)),
    torch.Tensor.unbind: unbind,
    torch.unbind: unbind,
    F.embedding: embedding,
    F.linear: linear,
}
"""For each function of torch, its replacement if an argument is a streamed tensor."""


def _view(func: Any, viewed: Streamed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the view; None if it does more than select elements, so that the values must be generated."""
    views = func(viewed.geometry, *args, **kwargs)
    if any(view.dtype != viewed.dtype or view.is_neg() or view.is_conj() for view in pytree.tree_leaves(views)):
        return None
    return pytree.tree_map_only(torch.Tensor, lambda view: Streamed(view, viewed.source, viewed.cast_of), views)


def _is_cast(tensor: Streamed, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy differs only in its dtype: autocast caches such copies, so they must not have data."""
    elsewhere = kwargs.get("device") not in (None, tensor.device)
    return kwargs.get("dtype") is not None and tensor.geometry.is_contiguous() and not elsewhere


def _look_up(source: ParameterSource, index: torch.Tensor) -> torch.Tensor:
    """Look up rows of a table, and generate only these rows."""
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


def _find_row(index: Any) -> int | None:
    """Return the row that an index selects; None if it does not select one row."""
    if isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32):
        return int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _is_parameter(tensor: Any) -> bool:
    """Return whether this is a whole streamed parameter, not a view, a cast or a part of one."""
    return bool(getattr(tensor, "is_whole_parameter", False))


def _holds_experts(tensor: Any) -> bool:
    return _is_parameter(tensor) and tensor.ndim >= _EXPERT_DIMS
