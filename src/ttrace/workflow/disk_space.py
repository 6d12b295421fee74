"""Disk space that traces will take, known before they are made."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ttrace.errors import TTraceError


@dataclass(frozen=True)
class DiskSpace:
    """What the reference's trace takes, what is to come, and what is free; in bytes."""

    out: Path
    reference: int
    num_traces: int
    """How many traces are still to come."""
    free: int

    @classmethod
    def after(cls, reference: Path, out: Path, num_traces: int) -> DiskSpace:
        """Measure the reference's trace once it is there; the other traces will be written below `out`."""
        size = sum(path.stat().st_size for path in reference.rglob("*") if path.is_file())
        existing = next(path for path in (out, *out.absolute().parents) if path.exists())
        return cls(out, size, num_traces, shutil.disk_usage(existing).free)

    @property
    def needed(self) -> int:
        """The least that is needed: twins record as much as the reference, a candidate's ranks also their replicas."""
        return self.reference * self.num_traces

    @property
    def is_noteworthy(self) -> bool:
        """Whether people should know: the traces take gigabytes, or a tenth of what is free."""
        return self.needed > min(1 << 30, self.free // 10)

    def __str__(self) -> str:
        return (
            f"the reference's trace takes {format_bytes(self.reference)}; the other traces take at least "
            f"{format_bytes(self.needed)} more, and more still where the candidate's ranks hold replicas. Free: "
            f"{format_bytes(self.free)}"
        )

    def check(self) -> None:
        """Refuse to start what will not fit."""
        if self.needed > self.free:
            raise TTraceError(
                f"{self.out} is on a disk too full: {self}. Record less with --only or --skip, or choose another --out."
            )


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes for people: `1.7 MB`."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"
