"""Wide layouts, with ranks as threads of one process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.slow]


def test_64_ranks_are_traced_and_judged_clean_within_a_minute(tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.wide", str(tmp_path), "64", "8"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 ranks: exit 0, {'PASS': 615}" in done.stdout
    assert time.monotonic() - start < 60
