"""Events of a traced step, as hooks, patches and adapters report them to the session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.adapter import FrameworkEvents
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
    """How many events of each name this call had so far."""
    held: HeldIndices | None = None
    """The indices that an input of this call holds, if it states them. Outputs and gradients with as many rows hold the
    same."""
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
    """Everything that can happen in a traced step, except tensors of module calls, which `Hooks` reports by itself.

    A subclass overrides the events that it needs.
    """

    # Hooks on modules

    def on_call(self, name: str, *, again: bool) -> ModuleCall | None:
        """A module is about to run, or to be recomputed. Return None if this call is not watched."""
        del name, again
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


@dataclass(frozen=True)
class PipelineChunk:
    """One microbatch in one stage of a pipeline."""

    microbatch: int
    is_first: bool
    is_last: bool


class StepCounter:
    """Counter of steps, microbatches and module calls.

    Without a pipeline, each forward of the model begins a microbatch, unless `begin_microbatch` says so.
    """

    def __init__(self, first_step: int = 0) -> None:
        self.step = first_step
        self.num_batches = 0
        self.is_running = False
        self.is_in_update = False
        """Whether an optimizer steps now."""
        self.chunk: PipelineChunk | None = None
        self.is_pipelined = False
        self.is_driven = False
        """Whether `begin_microbatch` is called for each microbatch, so that forwards of the model do not begin one."""
        self._microbatch = -1
        self._calls: Counter[tuple[int, str]] = Counter()

    @property
    def microbatch(self) -> int:
        """The microbatch that runs now, as this rank counts them."""
        return self.chunk.microbatch if self.chunk else max(self._microbatch, 0)

    @property
    def is_watched(self) -> bool:
        """Whether tensors are traced now: inside a step and, in a pipeline, inside a chunk.

        A pass that only finds shapes runs outside of any chunk.
        """
        return self.is_running and (self.chunk is not None or not self.is_pipelined)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count this block as one step."""
        self._microbatch, self.num_batches = -1, 0
        self._calls.clear()
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = self.is_in_update = False
        self.step += 1

    @contextmanager
    def in_chunk(self, chunk: PipelineChunk) -> Iterator[None]:
        """Count this block as what a pipeline schedule does for one microbatch."""
        outer, self.chunk = self.chunk, chunk
        try:
            yield
        finally:
            self.chunk = outer

    def begin_microbatch(self) -> None:
        """Begin the next microbatch."""
        self.is_driven = True
        self._microbatch += 1

    def count_forward(self, name: str, *, is_repeated: bool) -> int:
        """Count a module's forward that begins, and return the number of this call within its microbatch."""
        if is_repeated and self.chunk is not None:
            return 0  # each stage on this rank has a part or a copy of the module
        if name == ROOT and not self.is_driven:
            self._microbatch += 1
        key = (self.microbatch, name)
        self._calls[key] += 1
        return self._calls[key] - 1

    def is_repeat_clear(self, name: str) -> bool:
        """Whether a recomputation of this module can only belong to one call."""
        return self._calls[self.microbatch, name] == 1
