"""Orders of dims: the same tensor may be `batch seq hidden` on one side and `seq batch hidden` on the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from ttrace.errors import CaptureError, TTraceError
from ttrace.layouts.region import Region

_REST = "..."


@dataclass(frozen=True)
class DimOrder:
    """The order of named dims in the reference and in the candidate."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]
    has_rest: bool
    is_merged: bool = False
    """Whether the named dims are merged into one, in which the last of them varies fastest."""

    @classmethod
    @cache
    def parse(cls, text: str) -> DimOrder:
        """Parse `batch seq ... -> seq batch ...`, or `(batch seq) ... -> (seq batch) ...` if these dims are merged."""
        is_merged = text.count("(") == text.count(")") == len(text.split("->"))
        sides = [side.replace("(", " ").replace(")", " ").split() for side in text.split("->")]
        if len(sides) != 2 or not _are_same_dims(*sides) or ("(" in text and not is_merged):
            raise TTraceError(
                f"{text!r} is not an order of dims: name the same dims on both sides, as in "
                "'batch seq ... -> seq batch ...', where '...' stands for the other dims and comes last."
            )
        ours, theirs = (tuple(name for name in side if name != _REST) for side in sides)
        return cls(ours, theirs, _REST in sides[0], is_merged)

    def find_transposition(self, num_dims: int, sizes: dict[str, int]) -> Transposition | None:
        """Find the transposition of a tensor of the reference; None if it needs none or has other dims."""
        named = 1 if self.is_merged else len(self.reference)
        if num_dims < named or (num_dims > named and not self.has_rest) or self.reference == self.candidate:
            return None
        return Transposition(self, sizes)


@dataclass(frozen=True)
class Transposition:
    """The transposition of a tensor's dims into the candidate's order. It stores the sizes of named dims."""

    order: DimOrder
    sizes: dict[str, int] = field(compare=False)

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the dims of the candidate: a view, unless dims are merged."""
        order = self.order
        if order.is_merged:
            return self._transpose_merged(tensor, order.reference, order.candidate)
        self.sizes.update(zip(order.reference, tensor.shape, strict=False))
        return tensor.permute(_permute(order.reference, order.candidate, tensor.ndim))

    def undo(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the dims of the reference."""
        order = self.order
        if order.is_merged:
            return self._transpose_merged(tensor, order.candidate, order.reference)
        return tensor.permute(_permute(order.candidate, order.reference, tensor.ndim))

    def _transpose_merged(self, tensor: torch.Tensor, ours: tuple[str, ...], theirs: tuple[str, ...]) -> torch.Tensor:
        separate: torch.Tensor = tensor.unflatten(0, self._list_sizes(ours))
        return separate.permute(_permute(ours, theirs, separate.ndim)).flatten(0, len(ours) - 1)

    def place(self, region: Region) -> Region:
        """Return the region with the dims of the candidate."""
        if self.order.is_merged:
            if not region.is_whole:
                raise CaptureError(
                    f"dims {' '.join(self.order.reference)} are merged, so a part of them cannot be placed."
                )
            return region
        dims = _permute(self.order.reference, self.order.candidate, len(region.shape))
        return Region(tuple(region.shape[dim] for dim in dims), tuple(region.dims[dim] for dim in dims))

    def _list_sizes(self, names: tuple[str, ...]) -> list[int]:
        if not self.sizes.keys() >= set(names):
            raise CaptureError(
                f"the sizes of {' and '.join(names)}, which are merged here, are not known from an earlier tensor."
            )
        return [self.sizes[name] for name in names]


def _permute(ours: tuple[str, ...], theirs: tuple[str, ...], num_dims: int) -> tuple[int, ...]:
    """Return, for each dim of theirs, the dim of ours."""
    return (*map(ours.index, theirs), *range(len(ours), num_dims))


def _are_same_dims(ours: list[str], theirs: list[str]) -> bool:
    is_last = all(_REST not in side[:-1] for side in (ours, theirs))
    return is_last and bool(ours) and len(set(ours)) == len(ours) and sorted(ours) == sorted(theirs)
