"""Start of automatic attachment in a process, by the hook when torch has been imported, or by a callback."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ttrace.attach import on_attach
from ttrace.automatic.variables import MARK_VARIABLE
from ttrace.automatic.watch import Watch
from ttrace.errors import CaptureError

if TYPE_CHECKING:
    from ttrace.capture.parts import Declarations

_installed: list[Watch] = []


def install(declared: Declarations | None = None) -> Watch:
    """Watch this process for a training step. If the script attaches by itself, all patches are removed.

    `declared` is what the script declared about its parallelism, to a callback.
    """
    if not _installed:
        watch = Watch(_report_problem)
        on_attach(watch.withdraw)
        watch.start()
        atexit.register(watch.close)
        _installed.append(watch)
    if declared is not None:
        _installed[0].declared = declared
    return _installed[0]


def _report_problem(problem: str) -> None:
    """Write a sentence to the file that `ttrace` reads; without the hook, raise it in the callback."""
    if MARK_VARIABLE not in os.environ:
        raise CaptureError(problem)
    Path(os.environ[MARK_VARIABLE]).write_text(problem, encoding="utf-8")
