"""Faults of a machine and of a script, which a training script brings about in its own process."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from unittest import mock

import torch

_PR_SET_KEEPCAPS = 8
_CAP_DAC_READ_SEARCH = 2
_NOBODY = 65534


def set_shim(name: str, *words: str) -> None:
    """Set a variable of shim.c."""
    os.environ[f"SHIM_{name}"] = ":".join(words)


def fill(folder: str, pages: str) -> None:
    """Fill the disk of a folder but for some pages."""
    state = os.statvfs(folder)
    left = int(pages) * resource.getpagesize()
    with Path(folder, "filler").open("wb") as file:
        file.write(bytes(max(0, state.f_bavail * state.f_bsize - left)))


def limit_files(spare: str) -> None:
    """Leave room for so many more open files."""
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened = []
    with suppress(OSError):
        while True:
            opened.append(os.dup(0))
    for file in opened[: int(spare)]:
        os.close(file)


def limit_file_size(num_bytes: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), resource.RLIM_INFINITY))


def limit_memory(spare: str) -> None:
    """Leave so many bytes of address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(spare), resource.RLIM_INFINITY))


def lift_limits() -> None:
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))


def become_nobody() -> None:
    """Become a user who may read everything, as the packages may lie in root's folder, but write nothing of root's."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = 1 << _CAP_DAC_READ_SEARCH
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    if library.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def fork(ending: str) -> None:
    """Fork; the child ends in this way, or goes on like its parent."""
    child = os.fork()
    if child:
        if ending != "daemon":
            os.waitpid(child, 0)
        return
    if ending == "exit":
        sys.exit(0)
    if ending == "at_once":
        os._exit(0)
    if ending == "daemon":
        os.setsid()
        time.sleep(7200)
    if ending == "other":
        torch.rand(3)  # other data from now on
        os.environ["RANK"] = "fork"
    # "both": it trains on


def become_daemon() -> None:
    """Go on in a session of its own, below nobody."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def close_output() -> None:
    sys.stdout.flush()
    for file in (1, 2):
        os.close(file)


def change_version(name: str, version: str) -> None:
    """Have this process see another version of a package."""
    read = metadata.version
    mock.patch.object(metadata, "version", lambda each: version if each == name else read(each)).start()
    if name in sys.modules:
        sys.modules[name].__version__ = version  # type: ignore[attr-defined]


def hang(seconds: str = "7200") -> None:
    time.sleep(float(seconds))


def change_folder(path: str) -> None:
    os.chdir(path)


def leave_folder() -> None:
    """Be in a folder that was removed."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)  # noqa: PTH106


def fail(words: str) -> None:
    raise RuntimeError(words)


FAULTS: dict[str, Callable[..., object]] = {
    "shim": set_shim,
    "fill": fill,
    "files": limit_files,
    "size": limit_file_size,
    "memory": limit_memory,
    "lift": lift_limits,
    "nobody": become_nobody,
    "fork": fork,
    "daemon": become_daemon,
    "close": close_output,
    "version": change_version,
    "hang": hang,
    "chdir": change_folder,
    "umask": lambda mode: os.umask(int(mode, 8)),
    "exec": lambda *words: os.execvp(words[0], words),
    "signal": lambda name: os.kill(os.getpid(), getattr(signal, name)),
    "exit": lambda status: os._exit(int(status)),
    "raise": fail,
    "remove": lambda path: subprocess.run(["rm", "-rf", path], check=True),
    "store": lambda *words: os.environ.__setitem__("STORE_FAULT", ":".join(words)),
    "name": lambda: os.write(1, f"rank {os.environ['RANK']} on {socket.gethostname()}\n".encode()),
    "cable": lambda: subprocess.run(["ip", "link", "set", "right", "down"], check=True),
    "touch": lambda path: Path(path).touch(),
    "gone": leave_folder,
    "mount": lambda *words: subprocess.run(["mount", *words], check=True),
}
"""By name; each gets the words that follow its name."""
