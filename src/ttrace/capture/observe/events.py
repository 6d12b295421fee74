"""Events of a traced step, as hooks, patches and adapters report them to the session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.events import FrameworkEvents
from ttrace.layouts.holds import HeldIndices
from ttrace.layouts.ids import ROOT, Kind
from ttrace.layouts.placement import Placement


@dataclass
class ModuleCall:
    """One call of one module: its step, microbatch and number, and its inputs."""

    name: str
    step: int
    microbatch: int
    number: int
    again: bool = False
    """Whether this call recomputes an earlier one."""
    first_node: int = 0
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    takes_floats: bool = False
    holds_floats: bool = False
    """Whether a module inside this call already took or returned floating-point numbers."""
    counts: Counter[str] = field(default_factory=Counter)
    """By name, how often something of that name happened in this call so far."""
    held: HeldIndices | None = None
    """The indices that an input states that it holds: outputs and gradients with as many rows hold the same."""
    gradients: dict[tuple[Kind, str], Placement] = field(default_factory=dict)
    """Where gradients will lie, by the kind and slot of the tensor that states it."""

    def number_of(self, name: str) -> int:
        """Count one more event of this name in this call, and return its number; the first one is 0."""
        self.counts[name] += 1
        return self.counts[name] - 1

    def is_entry(self, kind: Kind) -> bool:
        """Whether floating-point numbers enter the model here: its own input, or the output of an embedding."""
        if kind is Kind.INPUT:
            return self.name == ROOT
        return kind is Kind.OUTPUT and not self.takes_floats and not self.holds_floats


class SessionEvents(FrameworkEvents):
    """Everything that can happen in a traced step. A subclass overrides the events that it needs."""

    # Hooks on modules

    def on_call(self, name: str, *, again: bool) -> ModuleCall | None:
        """A module is about to run, or to be recomputed. Return None if this call is not watched."""
        del name, again
        return None

    def on_tensor(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """A call takes or returns a tensor, or gets its gradient. A returned tensor replaces it."""
        del call, kind, slot, tensor
        return None

    # Patches of torch functions

    def on_backward(self, roots: tuple[torch.Tensor | GradientEdge, ...]) -> None:
        """A backward pass is about to start from these tensors, or nodes of the graph."""

    def on_final_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """The gradients of these parameters, or these gradients, are final: their norm is about to be computed."""

    def on_topk(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """These indices were chosen along the last dim of the scores. A returned tensor replaces them."""
        del scores, chosen
        return None

    def on_collective(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """A collective or a message is issued: its name, its operator's arguments by name, and what runs it.

        Return what that returns.
        """
        del name, arguments
        return run()

    def on_wait(self, work: Any) -> None:
        """The script is about to wait for a collective."""

    def on_sequence_split(self, mesh: DeviceMesh, size: int, held: torch.Tensor) -> None:
        """A sequence of this size was split over a mesh. Each row of `held` has this rank's indices of one sample."""
