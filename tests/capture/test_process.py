"""End of a process that is traced or watched: it waits for threads of gloo that run, and not for those that wait."""

import ctypes
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import ttrace
from ttrace.capture.process import wait_for_gloo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states of threads are read from /proc")
_SET_NAME = 15
"""PR_SET_NAME of prctl."""


def run_named(name: bytes, work: Callable[[], None]) -> threading.Thread:
    """Run this in a thread with the name of gloo's, or another."""
    has_name = threading.Event()

    def run() -> None:
        assert ctypes.CDLL(None).prctl(_SET_NAME, name, 0, 0, 0) == 0
        has_name.set()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    has_name.wait()
    return thread


def compute() -> None:
    """Run without the interpreter for a while, as a thread of gloo does before it frees tensors."""
    data = bytes(1 << 20)
    for _ in range(200):
        hashlib.sha256(data)


def wait(ends: threading.Event) -> None:
    ends.wait()


def spin(ends: threading.Event) -> None:
    while not ends.is_set():
        hashlib.sha256(bytes(1 << 20))


def test_a_running_thread_of_gloo_is_waited_for() -> None:
    thread = run_named(b"pt_gloo_runloop", compute)
    wait_for_gloo()
    assert not thread.is_alive()


def test_other_threads_are_not_waited_for() -> None:
    ends = threading.Event()
    waiting = run_named(b"pt_gloo_runloop", lambda: wait(ends))
    running = run_named(b"other", lambda: spin(ends))
    begin = time.monotonic()
    wait_for_gloo()
    assert running.is_alive()
    assert time.monotonic() - begin < 4.0  # it gives up after five seconds
    ends.set()
    waiting.join()
    running.join()


BEGIN = """
import atexit, ctypes, hashlib, sys, threading
import torch
import ttrace

def work():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
    ends.wait()
    for _ in range(200):
        hashlib.sha256(bytes(1 << 20))
    open(sys.argv[1], "w").close()

ends = threading.Event()
threading.Thread(target=work, daemon=True).start()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRACED = """
session = ttrace.attach(model, optimizer)
atexit.register(ends.set)  # what is registered last runs first
with session.step():
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
"""
WATCHED = """
monitor = ttrace.watch(model, optimizer)
atexit.register(ends.set)
"""


def test_a_traced_process_waits_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BEGIN + TRACED)
    done = tmp_path / "done"
    command = (sys.executable, str(tmp_path / "train.py"), str(done))
    ran = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *command)
    assert ran.returncode == 0, ran.stderr
    assert done.exists(), "the process ended before the thread"


def test_a_watched_process_waits_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BEGIN + WATCHED)
    done = tmp_path / "done"
    command = [sys.executable, str(tmp_path / "train.py"), str(done)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert done.exists(), "the process ended before the thread"
