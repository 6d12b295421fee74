"""Lock of a run's folder: one process at a time writes into it, and the next one is told which.

The kernel gives the lock back when its holder ends, however it ends, so no lock is ever stale.
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
from pathlib import Path

from ttrace.errors import TTraceError

LOCK = ".lock"
"""The file that is locked. It stays: to remove it would let two processes hold two files of this name."""
CELLS, REFERENCES = "cells", "references"
"""The folders in which a sweep has its runs."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Have a run's folder for this process alone; it is made if it is not there. A sweep's folder includes its runs."""
    with ExitStack() as stack:
        absolute = folder.absolute()
        if absolute.parent.name in (CELLS, REFERENCES) and (absolute.parent.parent / LOCK).exists():
            stack.enter_context(_locked(absolute.parent.parent, fcntl.LOCK_SH))
        stack.enter_context(_locked(folder, fcntl.LOCK_EX))
        yield


def is_empty(folder: Path) -> bool:
    """Whether a folder has nothing in it but a lock, or is not there."""
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise TTraceError(f"{folder} cannot be written: {error}. Choose another folder.") from None
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TTraceError(
                f"{folder} is in use by {_holder(path)}. Wait until it ends, or use another folder."
            ) from None
        except OSError:
            pass  # a file system without locks: what a launch writes is still told apart from what another one does
        if kind == fcntl.LOCK_EX:
            _introduce(path)
        yield


def _introduce(path: Path) -> None:
    """Say who holds the lock; nobody depends on it but the message that another process prints."""
    known = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    try:
        path.write_text(json.dumps(known), encoding="utf-8")
    except OSError as error:
        raise TTraceError(f"{path} cannot be written: {error}.") from None


def _holder(path: Path) -> str:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']} since {known['since']}: {known['command']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
