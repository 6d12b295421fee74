"""No network: what reads traces works where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_runs import write_run
from zoo.harness.limits import HANG

EMPTY = ("unshare", "--user", "--map-root-user", "--net")
"""Runs a command where not even the loopback is up."""


def has_no_network() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.run([*EMPTY, "true"], capture_output=True, timeout=HANG).returncode


@pytest.mark.skipif(not has_no_network(), reason="this system makes no network namespaces for us")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("check", "RUN"), 1),
        (("report", "RUN"), 0),
        (("show", "RUN/candidate"), 0),
        (("explain", "RUN", "0/0/fc2/output"), 0),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_command_needs_no_network(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    run = write_run(tmp_path / "run", wrong=True)
    words = tuple(word.replace("RUN", str(run.folder)) for word in words)
    probe = "import socket, runpy, sys; assert not socket.if_nameindex()[1:]; "
    command = (sys.executable, "-c", f"{probe}sys.argv[0] = 'ttrace'; runpy.run_module('ttrace', run_name='__main__')")
    ended = subprocess.run([*EMPTY, *command, *words], capture_output=True, text=True, timeout=HANG)
    assert ended.returncode == code, ended.stdout + ended.stderr
