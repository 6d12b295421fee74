"""Wait, at the end of a process that is traced or watched, for threads of gloo that still hold tensors.

A thread of torch's gloo process group frees the tensors of a collective after it told the caller that the collective is
complete. It needs the interpreter for that. If Python ends in between, torch aborts the process ("terminate called
without an active exception", pytorch/pytorch#190489), with TTrace or without: a training that went well would end a
stage with an error. So the end of such a process waits until these threads are idle, which takes milliseconds.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_GLOO = "(pt_gloo_runloop"
"""How the names of these threads begin in their `stat`."""
_INTERVAL, _LONGEST = 0.005, 5.0
_NUM_IDLE = 3
"""How many times after each other all threads must be idle: one may just be about to run."""


def wait_for_gloo_at_exit() -> None:
    """Let the end of this process wait for the threads of gloo; calling it again changes nothing."""
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
    """Read the states of all threads of gloo: R for one that runs or could."""
    states = []
    for thread in _THREADS.iterdir():
        try:
            name, _, fields = (thread / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it ended
        if _GLOO in name:
            states.append(fields.split()[0])
    return states
