"""Server that forks a warm Python for every request, and knows every process below itself.

It runs as a script in a mount namespace of its own: what its processes mount goes away with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LEFT = "left"
"""The request for the processes that are left, as a JSON list."""
_NAMESPACES = ("net", "uts")
"""What a forked process takes over from its client."""
_NEEDED = (
    *("ttrace.attach", "ttrace.capture.start", "ttrace.cli.entry", "ttrace.cli.outcome", "ttrace.cli.options"),
    *("ttrace.cli.outcome", "ttrace.monitor.monitor", "ttrace.workflow.folder", "ttrace.workflow.run"),
    *(
        "ttrace.workflow.engines.torchrun",
        "tests.support.faulty_machine.faults",
        "torch.distributed.run",
        "rich.console",
    ),
    *(
        "tests.support.faulty_machine.store",
        "torch.distributed.tensor",
        "torch.nn.parallel",
        "torch._dynamo",
        "ttrace.report.terminal.listing",
    ),
)
Main = Callable[[], object]


class Server:
    """Server of one test process; `serve` returns in every child, with what the child is to do."""

    def __init__(self, address: str) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._clients: dict[int, socket.socket] = {}
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(16)
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        for file in (0, self._wake, self._listening):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> Main | None:
        """Answer requests until standard input ends; then end every process that is left."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    for process in _find_below(os.getpid()):
                        os.kill(process, signal.SIGKILL)
                    return None
                if key.fileobj == self._wake:
                    os.read(self._wake, 4096)
                elif key.fileobj is self._listening:
                    main = self._accept()
                    if main is not None:
                        return main
                elif key.data in self._clients:  # its client was killed
                    os.kill(key.data, signal.SIGKILL)
                    self._forget(key.data)
            self._reap()

    def _accept(self) -> Main | None:
        client, _ = self._listening.accept()
        head, files, _, _ = socket.recv_fds(client, 4, 3)
        request = b""
        while len(request) < struct.unpack("!I", head)[0]:
            request += client.recv(1 << 16)
        words, folder, environment, process = json.loads(request)
        if words == [_LEFT]:
            self._reap()
            client.sendall(json.dumps(_list_below(os.getpid())).encode())
            client.close()
            _close(files)
            return None
        if child := os.fork():
            _close(files)
            self._clients[child] = client
            self._selector.register(client, selectors.EVENT_READ, child)
            return None
        self._leave(client)
        _become(files, folder, environment, process)
        return lambda: _run(words)

    def _leave(self, client: socket.socket) -> None:
        """Put back, in a child, what belongs to the server."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listening, client, *self._clients.values()):
            one.close()
        _close((self._wake, self._woken))

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self._clients:
                    with contextlib.suppress(OSError):
                        self._clients[ended[0]].sendall(struct.pack("!i", os.waitstatus_to_exitcode(ended[1])))
                    self._forget(ended[0])

    def _forget(self, child: int) -> None:
        client = self._clients.pop(child)
        self._selector.unregister(client)
        client.close()


def _close(files: tuple[int, ...] | list[int]) -> None:
    for file in files:
        os.close(file)


def _become(files: list[int], folder: str, environment: dict[str, str], process: int) -> None:
    """Become the process that a client stands for."""
    for target, file in enumerate(files):
        os.dup2(file, target)
    _close(files)
    for name in _NAMESPACES:
        theirs = Path(f"/proc/{process}/ns/{name}")
        with contextlib.suppress(OSError):
            if theirs.readlink() != Path(f"/proc/self/ns/{name}").readlink():
                with theirs.open("rb") as namespace:
                    ctypes.CDLL(None).setns(namespace.fileno(), 0)
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    tempfile.tempdir = None  # of the server


def _run(words: list[str]) -> None:
    sys.argv = words
    if words[0] == "ttrace":
        from ttrace.cli import main

        main()
    elif words[0] == "torchrun":
        from torch.distributed.run import main as run_workers

        run_workers(words[1:])
    else:
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def _end(main: Main) -> NoReturn:
    """Do what a child is to do, and end like Python, but without clearing the memory: that takes half a second."""
    status = 0
    try:
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # private: it waits for other threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _list_below(top: int) -> list[str]:
    """List all processes below this one, with their commands."""
    found = []
    for process in sorted(_find_below(top)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append(f"{process} {words}")
    return found


def _find_below(top: int) -> set[int]:
    """Find all processes below this one but zombies."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.name)] = int(parent)
    below = {top}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {top}


def _warm_up() -> None:
    """Import what its processes need, and not more: a trace has the version of every package that is loaded."""
    for name in _NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would copy every page


if __name__ == "__main__":
    _warm_up()
    server = Server(sys.argv[1])
    print("ready", flush=True)
    main = server.serve()
    if main is not None:
        _end(main)
