"""Measurement of the memory of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """The peak memory of the process, and its growth since the beginning, in bytes."""

    total: int = 0
    beyond: int = 0


@contextmanager
def measured() -> Iterator[Peak]:
    """Measure what happens inside; known when it has ended."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, found = _field("VmRSS"), Peak()
    yield found
    found.total = _field("VmHWM")
    found.beyond = found.total - before


@contextmanager
def anonymous() -> Iterator[Peak]:
    """The same without the files that the process maps, looked at every few milliseconds."""
    before, found, is_over = _field("RssAnon"), Peak(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            found.total = max(found.total, _field("RssAnon"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.beyond = max(found.total - before, 0)


def _field(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
