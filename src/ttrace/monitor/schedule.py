"""Schedule of full traces in the middle of a run, with the parameters of `torch.profiler.schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from ttrace.errors import CaptureError


@dataclass(frozen=True)
class TraceSchedule:
    """Skip `wait` + `warmup` steps, then trace `active` steps; do this `repeat` times, or until the end if it is 0."""

    wait: int
    warmup: int = 0
    active: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.wait + self.warmup < 1 or self.active < 1:
            raise CaptureError(
                f"{self}: at least one step must precede a trace (wait + warmup), and `active` must be at least 1."
            )

    def is_start(self, step: int) -> bool:
        """Whether a trace starts with this step."""
        cycle, position = divmod(step, self.wait + self.warmup + self.active)
        return position == self.wait + self.warmup and (not self.repeat or cycle < self.repeat)
