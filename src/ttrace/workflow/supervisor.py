"""Parent of one launched command: when the command ends, or `ttrace` dies, it ends every process of the launch.

It runs as a script of its own (`python supervisor.py COMMAND`), so it imports the standard library only. Standard
input is a socket whose other end `ttrace` holds: the kernel closes it whatever happens to `ttrace`. torchrun starts its
workers in sessions of their own, so a process group does not reach them; a subreaper is the parent of all orphans
below it, so it does (docs/decisions/0020-launches.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

GRACE, LONGEST_KILL = 3.0, 4.0
"""Seconds after SIGTERM, and after SIGKILL. Together they stay under ten."""
CARRIED = "TTRACE_PLAN"
"""The variable that all processes of a launch have in their environment, each launch with another value."""
_PAUSE = 0.02
_PROCESSES = Path("/proc")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Find = Callable[[], set[int]]


def main(command: list[str]) -> int:
    """Run the command to its end or to that of `ttrace`, end everything, and report through standard input."""
    control = socket.socket(fileno=0)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    prctl = _prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    report: dict[str, object] = {"status": None, "error": "", "survivors": []}
    child = 0
    try:
        # Bound to a name: a Popen that is collected waits for its process, and its status would be lost.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Without this process the command would never be ended.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        child = process.pid
    except OSError as error:
        report["error"] = str(error)
    status = _wait(child, control, wake) if child else None
    report["status"] = status
    report["survivors"] = describe(end_all(lambda: _find_launched(child)))
    with contextlib.suppress(OSError):  # `ttrace` may be gone
        control.sendall(json.dumps(report).encode())
    return 0


def end_all(find: Find) -> set[int]:
    """Send SIGTERM to all processes found, later SIGKILL, until none is left; return those that could not be ended."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, LONGEST_KILL)):
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while processes := find():
            # A process may handle SIGTERM, so it gets it once; processes that start meanwhile get it too.
            for process in processes - signalled if number == signal.SIGTERM else processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, number)
            signalled |= processes
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        else:
            return set()
    return find()


def find_carriers(value: str) -> set[int]:
    """Find all other processes of this machine that have this plan in their environment, as far as we may read them."""
    entry, carriers = f"{CARRIED}={value}".encode(), set()
    for process in _list_processes():
        try:
            environment = (_PROCESSES / str(process) / "environ").read_bytes()
        except OSError:
            continue
        if process != os.getpid() and entry in environment.split(b"\0"):
            carriers.add(process)
    return carriers


def describe(processes: Iterable[int]) -> list[str]:
    """Describe each process: its number and its command."""
    descriptions = []
    for process in sorted(processes):
        try:
            words = (_PROCESSES / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            words = ""
        descriptions.append(f"{process} ({words.strip()[:80]})")
    return descriptions


def _wait(child: int, control: socket.socket, wake: int) -> int | None:
    """Wait for the child; return its status, negative for a signal, or None if `ttrace` ended before."""
    while True:
        for process, status in _reap():
            if process == child:
                return os.waitstatus_to_exitcode(status)
        ready, _, _ = select.select([control.fileno(), wake], [], [])
        if control.fileno() in ready:  # nothing is ever sent, so `ttrace` has ended
            return None
        if any(number != signal.SIGCHLD for number in os.read(wake, 4096)):
            return None


def _find_launched(child: int) -> set[int]:
    """Find all processes below this one, and those elsewhere on this machine that carry its plan; skip zombies."""
    _reap()
    if not (_PROCESSES / "self" / "stat").exists():  # not Linux
        return {-child} if child and _is_process_group(child) else set()
    parents = {}
    for process in _list_processes():
        try:
            stat = (_PROCESSES / str(process) / "stat").read_text(errors="replace")
            # The name before it is in brackets, and may hold anything.
            state, parent = stat.rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            parents[process] = int(parent)
    below = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    carried = os.environ.get(CARRIED, "")
    return (below | (find_carriers(carried) & parents.keys() if carried else set())) - {os.getpid()}


def _list_processes() -> list[int]:
    return [int(path.name) for path in _PROCESSES.iterdir() if path.name.isdigit()] if _PROCESSES.is_dir() else []


def _is_process_group(child: int) -> bool:
    try:
        os.killpg(child, 0)
    except OSError:
        return False
    return True


def _reap() -> list[tuple[int, int]]:
    """Collect children that ended, orphans among them, with their statuses."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(one)
    return ended


def _prctl() -> Callable[[int, int], object]:
    """Return Linux's prctl; elsewhere a function that does nothing."""
    if not sys.platform.startswith("linux"):
        return lambda *_: None
    call = ctypes.CDLL(None).prctl
    return lambda option, value: call(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
