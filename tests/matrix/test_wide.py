"""Wide layouts, with ranks as threads of one process. `python -m bench threads` says how long they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zoo.harness.limits import HANG

pytestmark = [pytest.mark.matrix, pytest.mark.slow]


def test_64_ranks_are_traced_and_judged_clean(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zoo.harness.threads", str(tmp_path), "64", "8"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 ranks: exit 0, {'PASS': 615}" in done.stdout
