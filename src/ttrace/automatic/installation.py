"""Start of automatic attachment in a process, as soon as it has imported torch."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from ttrace.attach import on_attach
from ttrace.automatic.variables import MARK_VARIABLE
from ttrace.automatic.watch import Watch


def install() -> None:
    """Watch this process for a training step. If the script attaches by itself, everything is put back."""
    watch = Watch(_write_problem)
    on_attach(watch.withdraw)
    watch.start()
    atexit.register(watch.close)


def _write_problem(problem: str) -> None:
    Path(os.environ[MARK_VARIABLE]).write_text(problem, encoding="utf-8")
