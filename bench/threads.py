"""Seconds to trace and judge 64 ranks of FSDP2 x TP, which are threads of one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

SECONDS = 60.0
"""The bar: from the start of the process to its end, on an idle machine."""
NUM_RANKS, TP = 64, 8


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        command = [sys.executable, "-m", "zoo.harness.threads", folder, str(NUM_RANKS), str(TP)]
        status = subprocess.run(command, check=False).returncode
        seconds = time.monotonic() - start
    print(f"threads: {NUM_RANKS} ranks traced and judged in {seconds:.1f} s (bar {SECONDS:.0f} s)")
    return int(status != 0 or seconds > SECONDS)
