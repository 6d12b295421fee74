"""What is known of a live tensor, and the contract of a probe."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ttrace.layouts.holds import HeldIndices
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import Placement
from ttrace.values.generate import Distribution


class Visit(NamedTuple):
    """One live tensor, and what is known of it.

    It is passed from the place where the tensor is noticed to the probes. A named tuple and not a dataclass: a step
    makes thousands, and a frozen dataclass takes longer to make.
    """

    id: TensorId
    tensor: torch.Tensor
    placement: Placement | None = None
    """Where the tensor lies. Whoever makes the visit sets it only if it is known there; the dispatcher resolves it."""
    microbatch: int = 0
    entry: bool = False
    """Whether floating-point numbers enter the model here: its input, an embedding's output, its logits' gradient."""
    values: Distribution | None = None
    """The distribution of the tensor or, in isolation, of the values that replace it."""
    is_generated: bool = False
    """Whether the tensor has no data, because `values` generates all of it."""
    is_part: bool = False
    """Whether this rank may have other parts of the same tensor, as in a port."""
    held: HeldIndices | None = None
    """The indices that an input of the same call states that it holds; they apply if the tensor has as many rows."""
    fallback: Placement | None = None
    """The placement if the resolver finds none."""

    @property
    def enters_module(self) -> bool:
        """Whether this tensor enters a module, forward or backward."""
        return self.id.kind in (Kind.INPUT, Kind.RECOMPUTE_INPUT, Kind.GRAD_OUTPUT)


class Probe(Protocol):
    """An observer of visits, which may return a tensor to be used instead."""

    def visit(self, visit: Visit) -> torch.Tensor | None: ...
