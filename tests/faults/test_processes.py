"""No process outlives its launch, however the launch, its supervisor or `ttrace` ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.workflow.launch import launch
from zoo.harness.limits import HANG

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:] != ["child"]:
    # A daemon: in a session of its own, and its parent does not stay.
    middle = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle, __file__, "child"])
print(f"pid {os.getpid()}", flush=True)
time.sleep(7200)
"""
LAUNCHER = """
import sys
from pathlib import Path
from ttrace.capture.plan import Plan
from ttrace.workflow.launch import launch
launch(tuple(sys.argv[2:]), Plan(out=Path(sys.argv[1])), timeout=1800)
"""


def stubborn(folder: Path) -> Path:
    (folder / "stubborn.py").write_text(STUBBORN)
    return folder / "stubborn.py"


def running(log: Path) -> list[int]:
    """The processes that the log speaks of and that still run."""
    words = log.read_text().split() if log.exists() else []
    numbers = [int(after) for word, after in itertools.pairwise(words) if word == "pid"]
    return [number for number in numbers if is_running(number)]


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(num_processes: int, log: Path, seconds: float = HANG / 2) -> list[int]:
    deadline = time.monotonic() + seconds
    while len(found := running(log)) != num_processes and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder / "trace"), *command])


def test_a_daemon_that_ignores_sigterm_ends_with_the_timeout(tmp_path: Path) -> None:
    for seconds in (3, 30, 300):  # on a busy machine, both processes may not have started within the first
        with pytest.raises(TTraceError, match=f"did not end within {seconds} s"):
            launch((sys.executable, str(stubborn(tmp_path))), Plan(out=tmp_path / "trace"), timeout=seconds)
        if (tmp_path / "trace.log").read_text().count("pid") == 2:
            break
    else:
        pytest.fail("the command did not start its daemon")
    assert running(tmp_path / "trace.log") == []


def test_a_daemon_ends_with_a_command_that_ended_well(tmp_path: Path) -> None:
    left = f"{sys.executable} {stubborn(tmp_path)} child & while ! grep -q pid trace.log; do sleep 0.1; done"
    done = launch(("bash", "-c", f"cd {tmp_path}; setsid {left}"), Plan(out=tmp_path / "trace"), timeout=HANG)
    assert done.status == 0
    assert (tmp_path / "trace.log").read_text().count("pid") == 1
    assert running(tmp_path / "trace.log") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_everything_ends_with_ttrace(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, sys.executable, str(stubborn(tmp_path)))
    try:
        assert len(wait_for(2, tmp_path / "trace.log")) == 2
    finally:
        process.send_signal(number)
        process.wait(HANG)
    assert wait_for(0, tmp_path / "trace.log") == []


def test_everything_ends_with_its_supervisor(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable, str(stubborn(tmp_path)))
    try:
        assert len(wait_for(2, tmp_path / "trace.log")) == 2
        (supervisor,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(supervisor), signal.SIGKILL)
        assert wait_for(0, tmp_path / "trace.log") == []
    finally:
        process.kill()
        process.wait(HANG)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_torchruns_workers_end_with_ttrace(tmp_path: Path, number: signal.Signals) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(tmp_path, *torchrun, str(stubborn(tmp_path)))
    try:
        assert len(wait_for(4, tmp_path / "trace.log")) == 4  # two workers, a daemon of each
    finally:
        process.send_signal(number)
        process.wait(HANG)
    assert wait_for(0, tmp_path / "trace.log") == []


def test_a_status_and_a_command_that_is_not_there_are_told(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path / "trace")
    assert launch(("bash", "-c", "exit 3"), plan, timeout=HANG).status == 3
    assert launch(("bash", "-c", "kill -9 $$"), plan, timeout=HANG).status == -9
    with pytest.raises(TTraceError, match=r"cannot be started: .*No such file"):
        launch(("no-such-command",), plan, timeout=HANG)
