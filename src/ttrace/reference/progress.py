"""Progress of a streamed step on stderr: parameters read, gradients complete, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ttrace.compat.torch import is_in_backward

INTERVAL = 10.0
"""Seconds between two lines; a shorter step prints nothing."""
_BACKWARD = 2
"""The work of a backward pass in units of the forward pass."""


class StreamProgress:
    """Count of the elements of parameters that forward has read, and of gradients that are complete."""

    def __init__(
        self,
        numel: int,
        num_microbatches: int = 1,
        say: Callable[[str], object] | None = None,
        *,
        interval: float = INTERVAL,
    ) -> None:
        self._total = max(numel, 1) * num_microbatches * (1 + _BACKWARD)
        self._num_microbatches = num_microbatches
        self._say = say or _to_stderr
        self._interval = interval
        self._is_backward = False
        self._begin()

    def on_read(self, numel: int) -> None:
        """Count a parameter that is read; when backward reads it again, this is part of its gradient's work."""
        if is_in_backward():
            return
        if self._is_backward and self._num_passes == self._num_microbatches:
            self._begin()
        self._is_backward = False
        self._grow(numel)

    def on_gradient(self, numel: int) -> None:
        """Count a gradient that is complete."""
        self._num_passes += not self._is_backward
        self._is_backward = True
        self._grow(numel * _BACKWARD)

    def _begin(self) -> None:
        """Begin a step."""
        self._done = self._num_passes = 0
        self._start = self._last_line = time.monotonic()

    def _grow(self, work: int) -> None:
        self._done += work
        now = time.monotonic()
        if now - self._last_line >= self._interval and work:
            self._last_line = now
            share = min(self._done / self._total, 1.0)
            left = (now - self._start) * (1 / share - 1)
            self._say(f"ttrace: streamed {share:.0%} of the step, about {_format_time(left)} left")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _format_time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
