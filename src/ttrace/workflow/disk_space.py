"""Disk space that the candidate's trace will take, known before it is made; twins are not stored."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.report.numbers import format_bytes


@dataclass(frozen=True)
class DiskSpace:
    """What the reference's trace takes, and what is free; in bytes."""

    out: Path
    reference: int
    free: int

    @classmethod
    def after(cls, reference: Path, out: Path) -> DiskSpace:
        """Measure the reference's trace once it is there; the candidate's will be written below `out`."""
        size = sum(path.stat().st_size for path in reference.rglob("*") if path.is_file())
        return cls(out, size, shutil.disk_usage(find_existing(out)).free)

    @property
    def is_noteworthy(self) -> bool:
        """Whether people should know: the trace takes gigabytes, or a tenth of what is free."""
        return self.reference > min(1 << 30, self.free // 10)

    def __str__(self) -> str:
        return (
            f"the reference's trace takes {format_bytes(self.reference)}; the candidate's takes at least as much, and "
            f"more where its ranks hold replicas. Free: {format_bytes(self.free)}"
        )

    def check(self) -> None:
        """Refuse to start what will not fit."""
        if self.reference > self.free:
            raise TTraceError(
                f"{self.out} is on a disk too full: {self}. Record less with --budget, --only or --skip, or choose "
                "another --out."
            )


def find_existing(folder: Path) -> Path:
    """Find the folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
