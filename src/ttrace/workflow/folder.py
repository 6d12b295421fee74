"""Folder of a run: its lock, and whether its disk has space for the traces.

One process at a time writes into the folder, and others name that process when they refuse. The kernel releases the
lock when its holder ends, however it ends, so a lock is never stale.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.report.facts import format_bytes
from ttrace.untrusted import parse_json, read_text

LOCK = ".lock"
"""The file that is locked. It is never removed: otherwise two processes could hold two files of this name."""
CELLS, REFERENCES = "cells", "references"
"""The folders in which a sweep has its runs."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process; it is made if needed. The lock of a sweep's folder includes its runs."""
    with ExitStack() as stack:
        absolute = folder.absolute()
        if absolute.parent.name in (CELLS, REFERENCES) and (absolute.parent.parent / LOCK).exists():
            stack.enter_context(_lock(absolute.parent.parent, fcntl.LOCK_SH))
        stack.enter_context(_lock(folder, fcntl.LOCK_EX))
        yield


def is_empty(folder: Path) -> bool:
    """Whether a folder has nothing in it but a lock, or is not there."""
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


@contextmanager
def _lock(folder: Path, kind: int) -> Iterator[None]:
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        raise TTraceError(f"{folder} cannot be written: {error}. Choose another folder.") from None
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TTraceError(
                f"{folder} is in use by {_describe_holder(path)}. Wait until it ends, or use another folder."
            ) from None
        except OSError:
            pass  # a file system without locks: traces still record which launch wrote them
        if kind == fcntl.LOCK_EX:
            _write_holder(path, file)
        yield


def _write_holder(path: Path, file: FileIO) -> None:
    """Write who holds the lock, for the message that another process prints."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    try:
        file.truncate(0)
        file.write(json.dumps(holder).encode())
    except OSError as error:
        raise TTraceError(f"{path} cannot be written: {error}.") from None


def _describe_holder(path: Path) -> str:
    try:
        holder = parse_json(read_text(path), path)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}: {holder['command']}"
    except (OSError, ValueError, KeyError, TypeError, TTraceError):
        return "another process"


@dataclass(frozen=True)
class DiskSpace:
    """The bytes that the reference's trace takes, and those that are free, before the candidate is traced."""

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
        """Refuse to trace a candidate that will not fit; twins are not stored."""
        if self.reference > self.free:
            raise TTraceError(
                f"not enough disk space for {self.out}: {self}. Record less with --budget, --only or --skip, or choose "
                "another --out."
            )


def find_existing(folder: Path) -> Path:
    """Find the folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
