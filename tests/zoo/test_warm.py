"""A command that is forked from a warm server runs as it does without one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, pickle, sys
class Own:
    pass
pickle.dumps(Own())  # found by its name in __main__
print(sys.argv[1:], __name__, __file__, sys.path[0], os.getcwd(), os.environ["GREETING"], sys.stdin.read())
print("warm:", "torch" in sys.modules)
if sys.argv[1:] == ["raise"]:
    raise ValueError("no")
sys.exit(int(sys.argv[1]))
"""
SLEEPER = """
import os, sys, time
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GREETING": "hello"}
    return subprocess.run(
        words, input="typed", capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=100
    )


@pytest.mark.parametrize("argument", ["0", "7", "raise"])
def test_a_script_sees_what_it_sees_without_a_server(
    tmp_path: Path, argument: str, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    cold = run(tmp_path, "python", str(tmp_path / "script.py"), argument)
    request.getfixturevalue("warm_commands")
    warm = run(tmp_path, "python", str(tmp_path / "script.py"), argument)
    assert warm.returncode == cold.returncode
    assert warm.stdout == cold.stdout.replace("warm: False", "warm: True")
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


@pytest.mark.usefixtures("warm_commands")
def test_what_is_no_script_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "python", "-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


@pytest.mark.usefixtures("warm_commands")
def test_torchrun_starts_its_workers_by_the_server(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules)\n")
    done = run(tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "script.py")
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True"], done.stderr


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_process_behind_a_command(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SLEEPER)
    with subprocess.Popen(["python", "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        process = int(command.stdout.readline())
        assert process != command.pid
        command.send_signal(number)
        assert command.wait(100) == -number
    deadline = time.monotonic() + 100
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
