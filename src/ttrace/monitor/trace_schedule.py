"""Schedule of full traces in the middle of a run, with the words of torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass

from ttrace.errors import CaptureError


@dataclass(frozen=True)
class TraceSchedule:
    """Wait so many steps, and `warmup` more, then trace `active` steps; do that `repeat` times, or 0 for always."""

    wait: int
    warmup: int = 0
    active: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.wait + self.warmup < 1 or self.active < 1:
            raise CaptureError(f"{self}: a trace needs a step before it, and at least one active step.")

    def is_start(self, step: int) -> bool:
        """Whether a trace starts with this step."""
        cycle, position = divmod(step, self.wait + self.warmup + self.active)
        return position == self.wait + self.warmup and (not self.repeat or cycle < self.repeat)
