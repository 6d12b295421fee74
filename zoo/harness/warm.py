"""Python commands that need not import torch: each is forked from a server that has imported it once.

To import torch takes three seconds of CPU time, and one `ttrace run` on two ranks does it five to ten times. `warm`
puts stand-ins for `python`, `torchrun` and `ttrace` first on PATH. A stand-in hands its arguments, folder, environment
and standard streams to the server. It forwards signals, and ends as the forked process does; if it is killed, that
process is, too. Everything else is what it always is: torchrun's own code runs, and starts its workers by a stand-in.

Tests of processes themselves run the real commands: a forked process does not descend from the one that started it, and
its environment cannot be read from /proc. So does at least one test of each kind of launch, as README is followed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STAND_INS = ("python", "torchrun", "ttrace")
PRELOADED = (
    "zoo.harness.cells",
    "torch.distributed.run",
    "torch._dynamo",
    "ttrace.cli:app",
    "ttrace.automatic.installation",
)
"""What nearly every command imports, and nothing that starts a thread."""
_CLIENT = Path(__file__).with_name("warm_client.py")
_NUM_STREAMS = 3
_ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def warm(preloaded: Sequence[str] = PRELOADED) -> Iterator[dict[str, str]]:
    """Start a server, and yield the variables under which commands use it."""
    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="warm-") as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        for stand_in in STAND_INS:
            # -I -S: the stand-in itself imports nothing but the standard library.
            (folder / stand_in).write_text(f"#!{sys.executable} -IS\n{_CLIENT.read_text()}")
            (folder / stand_in).chmod(0o755)
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), *preloaded],
            stdin=subprocess.PIPE,  # its end is ours: the server ends, too
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
        try:
            yield {
                "PATH": os.pathsep.join([name, str(scripts), os.environ["PATH"]]),
                "PYTHON_EXEC": str(folder / "python"),  # by which torchrun starts its workers
            }
        finally:
            server.terminate()
            server.communicate()


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Only in these it returns: the request, and the streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        ready, _, _ = select.select([listener.fileno(), sys.stdin.fileno()], [], [])
        if listener.fileno() not in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request, streams = _receive(connection)
        child = os.fork()
        if not child:
            connection.close()
            return request, streams
        for stream in (*streams, *range(_NUM_STREAMS)):
            os.close(stream)
        _watch(connection, child)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    received, streams, _, _ = socket.recv_fds(connection, 1 << 16, _NUM_STREAMS)
    while not received.endswith(b"\n"):
        received += connection.recv(1 << 16)
    return json.loads(received), streams


def _watch(connection: socket.socket, child: int) -> None:
    """Pass signals on to a process, kill it if the stand-in is gone, and tell the stand-in how it ended."""
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection.fileno(), ended], [], [])
        if ended in ready:
            break
        number = connection.recv(1)
        signal.pidfd_send_signal(ended, number[0] if number else signal.SIGKILL)
        if not number:
            break
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request: Mapping[str, Any], streams: Sequence[int], paths: Sequence[str]) -> list[str]:
    """Make this process what Python is when it starts the requested command; return the command's words."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    words = list(request["words"])
    if words[0] == "-u":
        words.pop(0)
        for output in (sys.stdout, sys.stderr):
            output.reconfigure(write_through=True)  # type: ignore[union-attr]  # they are files
    first = str(Path.cwd()) if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *filter(None, own), *paths]
    sys.argv = words[1:] if words[0] == "-m" else words
    random.seed()
    sys.modules["numpy"].random.seed()
    _customize(own)
    return words


def _customize(folders: Sequence[str]) -> None:
    """Run the `sitecustomize` on PYTHONPATH, and what TTrace's waits for: that torch is imported."""
    if any((Path(folder) / "sitecustomize.py").exists() for folder in folders if folder):
        sys.modules.pop("sitecustomize", None)
        importlib.invalidate_caches()
        importlib.import_module("sitecustomize")
        for finder in [finder for finder in sys.meta_path if type(finder).__name__ == "_AfterTorch"]:
            sys.meta_path.remove(finder)
            importlib.import_module("ttrace.automatic.installation").install()


def main(descriptor: str, *preloaded: str) -> list[str]:
    own = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path.insert(0, own[0])
    for name in preloaded:
        pkgutil.resolve_name(name)
    paths = [path for path in sys.path if path not in own]
    gc.collect()
    gc.freeze()  # it is here to stay: forked processes need not look at it, nor copy it
    return become(*serve(socket.socket(fileno=int(descriptor))), paths)


if __name__ == "__main__":
    command = main(*sys.argv[1:])
    # At the top level, as Python runs it: so it ends as it would, whatever it raises.
    if command[0] == "-m":
        sys.modules["__main__"] = types.ModuleType("__main__")
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]  # what `python -m` calls
    else:
        sys.modules["__warm__"], main_module = sys.modules["__main__"], types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        main_module.__dict__.update(__file__=command[0], __builtins__=__builtins__)
        exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), main_module.__dict__)
