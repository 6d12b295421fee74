"""What is known of a live tensor, and the contract of a probe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import Placement
from ttrace.values.generate import Distribution


@dataclass(frozen=True, slots=True)
class Visit:
    """One live tensor: its id, the tensor itself, where it lies, and the distribution it was generated from."""

    id: TensorId
    tensor: torch.Tensor
    placement: Placement | None
    microbatch: int = 0
    entry: bool = False
    """Whether floating-point numbers enter the model here: its input, an embedding's output, its logits' gradient."""
    values: Distribution | None = None
    """The distribution of the tensor or, in isolation, of the values that replace it."""
    is_generated: bool = False
    """Whether the tensor has no data, because `values` generates all of it."""
    is_part: bool = False
    """Whether this rank may have other parts of the same tensor, as in a port."""

    @property
    def enters_module(self) -> bool:
        """Whether this tensor enters a module, forward or backward."""
        return self.id.kind in (Kind.INPUT, Kind.RECOMPUTE_INPUT, Kind.GRAD_OUTPUT)


class Probe(Protocol):
    """An observer of visits, which may return a tensor to be used instead."""

    def visit(self, visit: Visit) -> torch.Tensor | None: ...


def pass_down(probes: tuple[Probe, ...], visit: Visit) -> torch.Tensor | None:
    """Pass a visit down the chain, each probe's replacement to the next one; return the last replacement, if any."""
    current = visit
    for probe in probes:
        tensor = probe.visit(current)
        if tensor is not None:
            current = replace(current, tensor=tensor)
    return None if current is visit else current.tensor
