"""Scripts that run on other releases than those that are installed, and a default that is no bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttrace.judge.verdict import Exit
from zoo.harness.scripts import Script
from zoo.harness.with_wheels import unpack_release

VERSION = "import httpx, sys; print(httpx.__version__, *sys.argv[1:])"


def test_a_script_runs_on_the_release_that_it_is_given(tmp_path: Path) -> None:
    unpack_release("httpx==0.28.0")
    script = tmp_path / "script.py"
    script.write_text(VERSION)
    command = [sys.executable, "-m", "zoo.harness.with_wheels", "httpx==0.28.0", str(script), "--stage", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "0.28.0 --stage 2\n"


@pytest.mark.slow
def test_clipping_by_default_is_said_and_not_accused(tmp_path: Path) -> None:
    """DeepSpeed clips since 0.19.3 if it is told nothing; the reference does not."""
    command = Script("deepspeed_engine.py", "", "--stage 1 --clip").make_command(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == Exit.UNJUDGED, done.stderr
    assert "0/-/./clip is MISSING: only the candidate clips gradients" in done.stdout
    assert "FAIL" not in done.stdout
