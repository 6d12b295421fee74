"""Two things that a traced process does for its launcher: it ends cleanly, and it shows its stack if it hangs.

A thread of torch's gloo process group frees the tensors of a collective after the caller knows that the collective is
complete, and needs the interpreter for that. If Python ends in between, torch aborts the process ("terminate called
without an active exception", pytorch/pytorch#190489), with or without TTrace, and a stage whose training went well
would end with an error. So a traced or watched process waits at its end until these threads are idle, which takes
milliseconds.

A rank that hangs writes its stack into the folder of its trace when the launcher asks for it with a signal. The handler
is written in C, so it also works while the process waits in a collective.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ttrace.untrusted import create_file

_THREADS = Path("/proc/self/task")
_GLOO = "(pt_gloo_runloop"
"""How the names of these threads begin in their `stat`."""
_INTERVAL, _LONGEST = 0.005, 5.0
_NUM_IDLE = 3
"""How many times in a row all threads must be idle, because one may be about to run."""


def wait_for_gloo_at_exit() -> None:
    """Make this process wait for the threads of gloo when it ends; calling this again changes nothing."""
    atexit.unregister(wait_for_gloo)
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until no thread of gloo runs, a few seconds at most."""
    end = time.monotonic() + _LONGEST
    num_idle = 0
    try:
        while (states := _read_states()) and num_idle < _NUM_IDLE and time.monotonic() < end:
            time.sleep(_INTERVAL)  # gives the interpreter to a thread that waits for it
            num_idle = 0 if "R" in states else num_idle + 1
    except OSError:  # only Linux shows threads, and not to a process without free file descriptors
        time.sleep(_NUM_IDLE * _INTERVAL)


def _read_states() -> list[str]:
    """Read the states of all threads of gloo; R stands for one that runs or is ready to run."""
    states = []
    for thread in _THREADS.iterdir():
        try:
            name, _, fields = (thread / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it ended
        if _GLOO in name:
            states.append(fields.split()[0])
    return states


STACK = "stack.txt"
"""The file in a rank's folder: the process id in the first line, then the stack, if the launcher asked for it."""
SIGNAL = getattr(signal, "SIGUSR2", None)
"""The signal that asks for the stack; None on platforms without it."""


def offer_stack(folder: Path) -> Callable[[], None]:
    """Let this process write its stack into a folder when it gets the signal; return a function that ends this."""
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
