"""The tokens that an expert gets: they come from several ranks, and so from several microbatches.

No communication is needed. The reference's routing, which candidates repeat, determines which tokens of which
microbatch go to an expert, and the dispatcher's order of ranks determines the rows in which they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ttrace.adapters.adapter import Recall, Share
from ttrace.adapters.megatron.layouts import Module, is_glu
from ttrace.errors import LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Coord, Mesh
from ttrace.layouts.placement import LayoutSource, Placement, Provenance
from ttrace.layouts.region import Region

_LOCAL = ".experts.local_experts."


@dataclass(frozen=True)
class ExpertPlace:
    """An expert: the layer that it belongs to, and its number in that layer."""

    layer: str
    expert: int

    @classmethod
    def of(cls, name: str) -> ExpertPlace | None:
        layer, separator, rest = name.partition(_LOCAL)
        return cls(layer, int(rest.partition(".")[0])) if separator else None

    @property
    def routing(self) -> Site:
        """The site of the router's output, which contains the experts of each token."""
        return Site(f"{self.layer}.router", Kind.OUTPUT, "1")


class TokenDispatch:
    """The assignment of the rows of an expert's input to tokens."""

    def __init__(self, mesh: Mesh, coord: Coord, *, gathers: bool, sequence_parallel: bool) -> None:
        self._mesh, self._coord = mesh, coord
        self._tp = "etp" if "etp" in mesh.sizes else "tp"
        self._tokens = Layout.parse("tokens/cp:zigzag/tp" if sequence_parallel else "tokens/cp:zigzag")
        # Gathered tokens are in the order of ranks. Tokens sent to an expert are ordered by its tensor parallelism
        # first.
        self._sources = sorted(self._find_sources(), key=lambda at: (at["ep"], at[self._tp])[:: 1 if gathers else -1])

    def split_rows(
        self, at: Module, place: ExpertPlace, kind: Kind, tensor: torch.Tensor, number: int, recall: Recall
    ) -> Iterator[Share]:
        """Split a tensor into the rows of each microbatch; `number` is the number of microbatches before."""
        rows: dict[int, list[torch.Tensor]] = {}
        positions: dict[int, list[torch.Tensor]] = {}
        sizes: dict[int, int] = {}
        start = 0
        for source in self._sources:
            microbatch = number * self._mesh.sizes.get("dp", 1) + source.get("dp", 0)
            chosen = self._find_chosen(place, microbatch, recall)
            own = self._tokens.region(tuple(chosen.shape), self._mesh.sizes, source)
            there = own.take(chosen.cumsum(0) - 1)[own.take(chosen)]
            rows.setdefault(microbatch, []).append(torch.arange(start, start + there.numel(), device="cpu"))
            positions.setdefault(microbatch, []).append(there)
            sizes[microbatch] = int(chosen.sum())
            start += there.numel()
        if start != tensor.shape[0]:
            raise LayoutError(
                f"expert {place.expert} of {place.layer} got {tensor.shape[0]} tokens, but the reference's routing "
                f"assigns {start} tokens to it."
            )
        for microbatch, parts in rows.items():
            where = self._place_rows(at, kind, tensor, torch.cat(positions[microbatch]), sizes[microbatch])
            yield Share(microbatch, torch.cat(parts), where)

    def _find_sources(self) -> Iterator[Coord]:
        """Find the ranks that send tokens to this one."""
        for other in self._mesh.coords():
            if all(other.get(axis) == self._coord.get(axis) for axis in ("pp", "edp")):
                yield other

    def _find_chosen(self, place: ExpertPlace, microbatch: int, recall: Recall) -> torch.Tensor:
        routing = recall(place.routing, microbatch)
        if routing is None:
            raise LayoutError(
                f"the reference has no {place.routing} of microbatch {microbatch}. Trace routers as well."
            )
        return routing[:, place.expert].bool() if routing.dtype == torch.bool else (routing == place.expert).any(1)

    def _place_rows(
        self, at: Module, kind: Kind, tensor: torch.Tensor, positions: torch.Tensor, size: int
    ) -> Placement:
        cut, is_partial = _find_columns(at, kind.primal)
        # The gradient of a pending sum is replicated, and the gradient of a replicated tensor is a pending sum.
        is_pending = is_partial if kind.primal is kind else (not is_partial and "/" not in cut) or tensor.ndim == 1
        columns = Layout.parse(cut.format(tp=self._tp) if tensor.ndim > 1 else "")
        shape = columns.global_shape(tuple(tensor.shape[1:]), self._mesh.sizes)
        dims = columns.region(shape, self._mesh.sizes, self._coord).dims
        region = Region((size, *shape), (rg.from_indices(positions), *dims))
        pending = (self._tp,) if is_pending else ()
        text = " ".join(["rows", str(columns), *(f"+{axis}" for axis in pending)])
        return Placement(region, pending, text, Provenance(LayoutSource.ROUTING))


def _find_columns(at: Module, kind: Kind) -> tuple[str, bool]:
    """Find how an expert's columns are cut, and whether they are summands that are added when tokens are sent back."""
    if at.attribute == "linear_fc1" and kind is Kind.OUTPUT:
        return ("ffn/{tp}:fused(2)" if is_glu(at) else "ffn/{tp}"), False
    if at.attribute == "linear_fc2" and kind is Kind.INPUT:
        return "ffn/{tp}", False
    return "hidden", kind is Kind.OUTPUT
