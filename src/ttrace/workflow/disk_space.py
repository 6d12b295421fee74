"""This module says how much disk space traces will take, before they are made."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ttrace.errors import TTraceError


@dataclass(frozen=True)
class Space:
    """What the reference's trace takes, what is to come, and what the disk has left; in bytes."""

    out: Path
    reference: int
    num_traces: int
    """How many traces are still to come."""
    free: int

    @classmethod
    def after(cls, reference: Path, out: Path, num_traces: int) -> Space:
        """Measured once the reference's trace is there; the others are to be written below `out`."""
        size = sum(path.stat().st_size for path in reference.rglob("*") if path.is_file())
        existing = next(path for path in (out, *out.absolute().parents) if path.exists())
        return cls(out, size, num_traces, shutil.disk_usage(existing).free)

    @property
    def needed(self) -> int:
        """At least this much: twins record what the reference did, a candidate's ranks that and their replicas."""
        return self.reference * self.num_traces

    def __str__(self) -> str:
        return (
            f"the reference's trace takes {sized(self.reference)}; still to come: at least {sized(self.needed)}, "
            f"and more where the candidate's ranks hold replicas. Free: {sized(self.free)}"
        )

    def check(self) -> None:
        """Refuse to start what cannot end well."""
        if self.needed > self.free:
            raise TTraceError(
                f"{self.out} is on a disk too full: {self}. Record less with --only or --skip, or choose another --out."
            )


def sized(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"
