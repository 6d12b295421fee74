"""Meter of single inputs: what an input raises, and the time and memory that it takes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ttrace.errors import TTraceError

MAX_SECONDS = 2.0
"""Of CPU time, so that other work of the machine does not count; libFuzzer ends what hangs without working."""
MAX_BYTES = 256 << 20
_PEAK = Path("/proc/self/clear_refs")
"""Writing 5 to it forgets the peak so far."""
_QUICK = 0.02
"""Seconds in which nothing can use so much memory."""
_OFTEN = 1000
"""Memory that grows slowly, in caches, is looked at after so many inputs."""


class Meter:
    """Runs one input after the other, and says of each whether it failed."""

    def __init__(self) -> None:
        self._num_quick = 0
        self._look_at_memory()

    def run(self, target: Callable[[bytes], object], data: bytes) -> str:
        """Run an input; return in what way it failed, or nothing."""
        start, cpu = time.perf_counter(), 0.0
        failure = _run(target, data)
        seconds = time.perf_counter() - start
        if seconds < _QUICK:  # too short for much memory; and to ask the system takes longer
            self._num_quick += 1
            if self._num_quick % _OFTEN == 0:
                self._look_at_memory()
            return failure
        resident, peak = self._resident, self._peak
        self._look_at_memory()
        # An earlier peak that is higher than this one was reported then.
        is_large = self._peak > peak and self._peak - resident > MAX_BYTES
        if not failure and is_large and self._measure_again(target, data) > MAX_BYTES:
            failure = f"more than {MAX_BYTES >> 20} MiB"
        if not failure and seconds > MAX_SECONDS:
            cpu = time.process_time()
            failure = _run(target, data)
            cpu = time.process_time() - cpu
        return f"more than {MAX_SECONDS:g} s" if not failure and cpu > MAX_SECONDS else failure

    def _measure_again(self, target: Callable[[bytes], object], data: bytes) -> int:
        """Measure the memory of an input alone: many quick ones before it may have filled caches."""
        _PEAK.write_text("5", encoding="ascii")
        self._look_at_memory()
        resident = self._resident
        _run(target, data)
        self._look_at_memory()
        return self._peak - resident

    def _look_at_memory(self) -> None:
        self._resident, self._peak = _read_memory()


def _run(target: Callable[[bytes], object], data: bytes) -> str:
    """Run an input; return the error that it must not raise, or nothing."""
    try:
        target(data)
    except TTraceError:
        pass
    except Exception as error:
        return _describe_error(error)
    return ""


def _read_memory() -> tuple[int, int]:
    """Read what is resident and its peak; not getrusage, whose peak is inherited from the process that started this."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return int(sizes["VmRSS"]) << 10, int(sizes["VmHWM"]) << 10


def _describe_error(error: Exception) -> str:
    """Describe an error by its type and place: inputs that fail alike are one failure."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "ttrace" in Path(frame.filename).parts] or frames
    place = ours[-1]
    return f"{type(error).__name__} at {'/'.join(Path(place.filename).parts[-3:])}:{place.lineno}"
