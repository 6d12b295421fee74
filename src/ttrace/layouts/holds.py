"""`ttrace.holds`: tensors that state which rows of their logical tensor they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.region import Region, Shape

_TAG = "_ttrace_held"
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True)
class HeldIndices:
    """The indices of one dim that a tensor holds, in its own order, and the size of that dim in the logical tensor."""

    indices: torch.Tensor
    size: int
    dim: int

    def fits(self, local: Shape) -> bool:
        """Return whether a tensor of this shape may hold these indices."""
        return self.dim < len(local) and local[self.dim] == self.indices.numel()

    def region(self, local: Shape) -> Region:
        """Return what a tensor of this local shape holds; its other dims are whole."""
        dims = [rg.whole(size) for size in local]
        dims[self.dim] = rg.from_indices(self.indices)
        return Region((*local[: self.dim], self.size, *local[self.dim + 1 :]), tuple(dims))


def holds(tensor: _Tensor, indices: torch.Tensor, size: int, dim: int = 0) -> _Tensor:
    """State which indices of a logical dim a tensor holds, and return the tensor.

    `size` is the size of dim `dim` in the logical tensor; `indices` has one entry for each index of the tensor's own
    dim.

    Use it where a layout cannot describe a tensor because its rows depend on the data, such as tokens dispatched to
    experts, or packed samples. Number the elements so that every layout gives them the same numbers (token x top_k +
    choice), and state them in the reference too, right before the tensor enters a module:

        rows = ttrace.holds(rows, slots, num_tokens * top_k)
        out = self.experts(rows, counts)

    Outputs and gradients of that call with the same number of rows hold the same indices, unless a rule matches them.
    For the tensor itself, this takes precedence over rules. Outside of tracing, only an attribute is set.
    """
    where = dim % tensor.ndim if tensor.ndim else 0
    if indices.ndim != 1 or not tensor.ndim or tensor.shape[where] != indices.numel():
        raise LayoutError(
            f"ttrace.holds: a tensor of shape {tuple(tensor.shape)} needs one index for each element of dim {dim}, "
            f"but the indices have shape {tuple(indices.shape)}."
        )
    setattr(tensor, _TAG, HeldIndices(indices.detach(), size, where))
    return tensor


def find_held(tensor: torch.Tensor) -> HeldIndices | None:
    """Return the indices that `holds` stated for a tensor; None if it was not called."""
    held: HeldIndices | None = getattr(tensor, _TAG, None)
    return held
