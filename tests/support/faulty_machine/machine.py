"""A machine with faults, for tests: commands on it, and what must hold after each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.faulty_machine.client import ask, read_status
from ttrace.trace.format import RECORDS, rank_folder
from ttrace.trace.reader import Trace
from ttrace.trace.writer import HEADER_BYTES

HERE = Path(__file__).parent
TRAIN = str(HERE / "train.py")
BITS = "bits.txt"
"""The file for what a script prints whose standard output is closed."""
LONGEST = 150.0
"""Seconds after which a command counts as hanging, and is killed."""
_STEPS = ("--steps", "2", "--own-parameters", "--attach", "script")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    output: str
    """Standard output and error, in one line."""


@dataclass(frozen=True)
class FaultCase:
    """A fault, and what follows from it."""

    name: str
    faults: str
    """Arguments of train.py; FOLDER stands for the folder of the candidate's trace, and RUN for that of the run."""
    exit_code: int = 2
    """Of `ttrace trace`."""
    sentence: str = ""
    """A pattern of what it prints."""
    check_code: int = 2
    """Of `ttrace check` afterwards."""
    check_sentence: str = ""
    num_steps: int | None = 2
    """How many steps each rank completes; None if that depends on who is faster."""
    options: str = ""
    """Further options of `ttrace trace`."""
    before: str = ""
    """A command that prepares the machine, for bash."""
    is_slow: bool = False
    """Whether to launch a Python of its own, which takes seconds, so that all its processes are below `ttrace`."""

    def __str__(self) -> str:
        return self.name


class Machine:
    """The machine on which all cases of a test process run."""

    def __init__(self, address: str, server: int) -> None:
        self._address = address
        self._server = server

    def shell(self, command: str, folder: Path) -> str:
        """Run a command of bash where the machine's mounts are, and return what it prints."""
        words = ("nsenter", "--mount", f"--target={self._server}", f"--wdns={folder}", "bash", "-c", command)
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LONGEST, check=False)
        text = done.stdout.decode(errors="replace")
        assert done.returncode == 0, text
        return text

    def run(
        self, *words: str, folder: Path, timeout: float = LONGEST, variables: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a command in a folder."""
        for name in ("tmp", "home"):
            (folder / name).mkdir(exist_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TTRACE", "PYTEST"))},
            "COLUMNS": "100",
            "FAULTS_BITS": str(folder / BITS),
            "HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
            "TMPDIR": str(folder / "tmp"),
            **(variables or {}),
        }
        read, write = os.pipe()
        with open(os.devnull) as nothing, os.fdopen(read, "rb") as output:  # noqa: PTH123
            server = ask(self._address, words, str(folder), environment, (nothing.fileno(), write, write))
            os.close(write)
            # A server that is no longer asked kills the process, and its supervisor everything below it.
            hanging = threading.Timer(timeout, lambda: server.shutdown(socket.SHUT_RDWR))
            hanging.start()
            with server:
                status = read_status(server)
            assert hanging.is_alive(), f"{words} did not end"
            hanging.cancel()
            return Ended(status, " ".join(output.read().decode(errors="replace").split()))

    def python(self, *words: str) -> tuple[str, ...]:
        """Return the command of a process that is forked by the server."""
        return (sys.executable, "-I", "-S", str(HERE / "client.py"), self._address, *words)

    def torchrun(self, num_ranks: int, *words: str) -> tuple[str, ...]:
        options = ("--standalone", "--nproc-per-node", str(num_ranks), "--no-python")
        return self.python("torchrun", *options, *self.python(*words))

    def list_left(self, seconds: float = 10.0) -> list[str]:
        """List the processes that are left, after a moment in which those that were killed end."""
        deadline = time.monotonic() + seconds
        while True:
            with open(os.devnull) as nothing:  # noqa: PTH123
                files = (nothing.fileno(),) * 3
                with ask(self._address, ["left"], "/", {}, files) as server:
                    left: list[str] = json.loads(b"".join(iter(lambda: server.recv(1 << 16), b"")))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


@contextlib.contextmanager
def open_machine(folder: Path) -> Iterator[Machine]:
    """Start a machine; everything on it ends with it, and what is mounted there goes away."""
    compiler, unshare = shutil.which("cc"), shutil.which("unshare")
    if compiler is None:
        pytest.skip("there is no C compiler (cc), with which a machine with faults is made")
    alone = (unshare or "unshare", "--mount", "--propagation", "private")
    if subprocess.run((*alone, "true"), capture_output=True, check=False).returncode:
        pytest.skip("this process may not have a mount namespace of its own (unshare --mount)")
    shim, address = folder / "shim.so", str(folder / "socket")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, HERE / "shim.c", "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        (*alone, sys.executable, "-m", "tests.support.faulty_machine.server", address),
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield Machine(address, server.pid)
    finally:
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            pipe.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGKILL)
            server.wait()


def read_bits(text: str) -> dict[str, str]:
    """Read what the training printed: by rank and step, the digest of all its numbers. Forks call themselves fork."""
    return dict(re.findall(r"(rank \d+ step \d+) bits ([0-9a-f]{16})", text))


class Trials:
    """Cases on one machine, which share a reference and a twin."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self._clean = folder / "clean"
        self._clean.mkdir()
        self._bits: dict[int, dict[str, str]] = {}
        for name, options in (("reference", ()), ("twin-1", ("--reference", "run/reference", "--twin", "1"))):
            made = self.trace(self._clean, name, machine.python(TRAIN), *options)
            assert made.status == 0, made
        # The same in a store, which is a folder.
        for name in ("reference", "twin-1"):
            shutil.copytree(self._clean / "run" / name, self._clean / "run" / "store" / name)
        self._pages = measure_pages(self._clean / "run" / "reference")

    def find_bits(self, num_ranks: int) -> dict[str, str]:
        """Return the bits of a training without TTrace."""
        if num_ranks not in self._bits:
            command = self._command(num_ranks, TRAIN)
            shown = self.machine.shell(shlex.join(command), self._clean)
            self._bits[num_ranks] = read_bits(shown)
            assert len(self._bits[num_ranks]) == 3 * num_ranks, shown
        return self._bits[num_ranks]

    def _command(self, num_ranks: int, *words: str) -> tuple[str, ...]:
        return self.machine.torchrun(num_ranks, *words) if num_ranks > 1 else self.machine.python(*words)

    def trace(self, folder: Path, name: str, command: Sequence[str], *options: str) -> Ended:
        """Run `ttrace trace`."""
        return self.machine.run(
            "ttrace", "trace", "--out", f"run/{name}", *_STEPS, *options, "--", *command, folder=folder
        )

    def check(self, folder: Path, *options: str) -> Ended:
        return self.machine.run("ttrace", "check", "run", *options, folder=folder)

    def start(self, folder: Path) -> Path:
        """Make the folder of a case, with a reference and a twin."""
        folder.mkdir(exist_ok=True)
        shutil.copytree(self._clean / "run", folder / "run")
        return folder

    def verify(self, case: FaultCase, folder: Path, num_ranks: int = 1) -> None:
        """Run one case, and verify all that it says, the bits of the training, and that nothing is left."""
        self.start(folder)
        places = {"FOLDER": str(folder / "run" / "candidate"), "RUN": str(folder / "run"), **self._pages}
        faults, before = (_replace(text, places) for text in (case.faults, case.before))
        if before:
            self.machine.shell(before, folder)
        words = (TRAIN, *faults.split())
        command = (sys.executable, *words) if case.is_slow else self._command(num_ranks, *words)
        traced = self.trace(folder, "candidate", command, "--reference", "run/reference", *case.options.split())
        assert traced.status == case.exit_code, traced
        assert re.search(case.sentence, traced.output), traced
        assert "Traceback" not in traced.output, traced
        self.verify_bits(folder, num_ranks, case.num_steps)
        checked = self.check(folder)
        assert checked.status == case.check_code, checked
        assert re.search(case.check_sentence, checked.output), checked
        assert not re.search("unexpected|Traceback", checked.output), checked
        self.verify_nothing_left(folder)

    def verify_bits(self, folder: Path, num_ranks: int, num_steps: int | None) -> None:
        """Verify that the training computed what it computes without TTrace."""
        shown = self.machine.shell(f"cat run/candidate.log {BITS} 2> {os.devnull} || true", folder)
        bits, expected = read_bits(shown), self.find_bits(num_ranks)
        assert bits.items() <= expected.items(), shown
        assert num_steps is None or len(bits) == num_steps * num_ranks, shown

    def verify_nothing_left(self, folder: Path, *inside: str) -> None:
        """Verify that no process is left, and no file outside of these places and the run's folder."""
        assert self.machine.list_left() == []
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        assert [path for path in files if path.parts[0] not in ("run", BITS, *inside)] == []


def measure_pages(folder: Path) -> dict[str, str]:
    """Return names of moments in which a disk is full, and the pages that are free after the script has attached."""
    (rank,) = Trace(folder).ranks
    first = [record.end for record in rank.records if record.id.step == 0]
    lines = count_pages((folder / rank_folder(0) / RECORDS).stat().st_size)
    data = count_pages(max(record.end for record in rank.records) - HEADER_BYTES)
    return {
        "MID_CHUNK": "10",
        "MID_RECORD": str(count_pages(max(first) - HEADER_BYTES) + 1),
        "MID_HEADER": str(data + lines + 10),
        "AT_CLOSE": str(data + lines + count_pages(HEADER_BYTES)),
    }


def count_pages(num_bytes: int) -> int:
    return -(-num_bytes // resource.getpagesize())


def _replace(text: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text
