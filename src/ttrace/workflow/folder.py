"""Lock of a run's folder: one process at a time writes into it, and others name that process when they refuse.

The kernel releases the lock when its holder ends, however it ends, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from io import FileIO
from pathlib import Path

from ttrace.errors import TTraceError
from ttrace.files import read_text
from ttrace.untrusted import parse_json

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
            pass  # a file system without locks: traces still say which launch wrote them
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
