"""Disk space that traces will take, known before they are made."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.report.numbers import format_bytes


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
        return cls(out, size, num_traces, shutil.disk_usage(find_existing(out)).free)

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


def find_existing(folder: Path) -> Path:
    """Find the folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
