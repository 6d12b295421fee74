"""Stacks of ranks that hang: each writes its own into its trace's folder when the launcher asks for it by a signal.

The handler is written in C, so that it also works while the process waits in a collective.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

from ttrace.files import create_file

STACK = "stack.txt"
"""The file in a rank's folder: the number of the process in the first line, then its stack, if it was asked for."""
SIGNAL = getattr(signal, "SIGUSR2", None)
"""The signal that asks for it; None where there is none."""


def offer_stack(folder: Path) -> Callable[[], None]:
    """Let this process write its stack into a folder when it gets the signal; return what ends that."""
    if SIGNAL is None:
        return lambda: None
    path = folder / STACK
    folder.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(create_file(path), "w", encoding="utf-8")
    file.write(f"{os.getpid()}\n")
    file.flush()
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)

    def end() -> None:
        faulthandler.unregister(SIGNAL)
        file.close()
        path.unlink(missing_ok=True)

    return end
