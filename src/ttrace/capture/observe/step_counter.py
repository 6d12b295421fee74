"""Counter of steps, microbatches and module calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ttrace.layouts.ids import ROOT


@dataclass(frozen=True)
class PipelineChunk:
    """One microbatch in one stage of a pipeline."""

    microbatch: int
    is_first: bool
    is_last: bool


class StepCounter:
    """Counter of steps and microbatches.

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
        """Whether `begin_microbatch` is called for each microbatch, so that forwards of the model do not count them."""
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
