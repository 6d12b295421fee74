"""Training loops of frameworks are watched by their callbacks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from zoo.harness.limits import HANG

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_commands")]


@pytest.mark.parametrize("framework", ["trainer", "lightning", "deepspeed"])
def test_a_flipped_bit_is_named_and_nothing_else(framework: str, tmp_path: Path) -> None:
    """It flips before the last of three checks: the first two are silent."""
    script = f"{ROOT}/tests/support/watched_framework.py"
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", script, framework, "--flip"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    [told] = [line for line in done.stdout.splitlines() if line.startswith("3 checks: [")]
    assert "step 4: " in told
    assert "second.weight/param differs on ranks 0, 1 along dp" in told
    assert told.count("differs") == 1
