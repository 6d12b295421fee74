"""Streamed parameters used as several leaves, where one gradient would be larger than what was used.

One weight that holds all experts gets a dense gradient from every expert, and an embedding gets one with a row for each
word. So single experts are leaves of their own, an embedding's gradient has only the rows that occurred, and a weight
above a stated size is used slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_EXPERT_DIMS = 3
"""An indexed parameter with at least this many dims holds one matrix for each expert."""
_own_item, _own_unbind = torch.Tensor.__getitem__, torch.Tensor.unbind
_own_embedding, _own_linear = F.embedding, F.linear


def item(tensor: Any, index: Any) -> Any:
    """Replace tensor[index]."""
    number = _find_row(index)
    if number is None or not _holds_experts(tensor) or not -tensor.shape[0] <= number < tensor.shape[0]:
        return _own_item(tensor, index)
    row = number % tensor.shape[0]
    return tensor.part(row, row + 1).squeeze(0)


def unbind(tensor: Any, dim: int = 0) -> Any:
    """Replace tensor.unbind(dim)."""
    if dim != 0 or not _holds_experts(tensor):
        return _own_unbind(tensor, dim)
    return tuple(tensor.part(row, row + 1).squeeze(0) for row in range(tensor.shape[0]))


def embedding(input: torch.Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # torch's name
    """Replace F.embedding, so that the gradient has only the rows that occurred."""
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    if options.get("max_norm") or options.get("scale_grad_by_freq") or not _is_parameter(weight):
        return _own_embedding(input, weight, **options)
    return _Lookup.apply(weight, input, options.get("padding_idx"))  # type: ignore[no-untyped-call]  # torch's own


class _Lookup(torch.autograd.Function):
    """Lookup of rows in a table. Torch's own sparse gradient has a row for each token, and its sums round otherwise."""

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
    """Return a sparse tensor that has each row once, summed by the kernel of dense gradients: others round more."""
    distinct, inverse = index.unique(return_inverse=True)
    total = torch.ops.aten.embedding_dense_backward(rows, inverse, distinct.numel(), -1, False)
    return torch.sparse_coo_tensor(distinct[None], total, shape, is_coalesced=True, check_invariants=False)


def linear(input: torch.Tensor, weight: Any, bias: Any = None) -> Any:  # noqa: A002  # torch's name
    """Replace F.linear, and compute the output in slices if the weight is larger than stated."""
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
"""For each function of torch, the function to call in its place when an argument is a streamed tensor."""


def _find_row(index: Any) -> int | None:
    """Find the row that an index selects; None if it selects anything else."""
    if isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32):
        return int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _is_parameter(tensor: Any) -> bool:
    """Whether this is a streamed parameter, and not a view, a cast or a part of one."""
    return bool(getattr(tensor, "is_whole_parameter", False))


def _holds_experts(tensor: Any) -> bool:
    return _is_parameter(tensor) and tensor.ndim >= _EXPERT_DIMS
