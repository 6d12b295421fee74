"""This module measures what recording does to an asynchronous device: waits, pinned memory, the order of kernels.

The device is the emulated one of tests/device, where waits of the host can be counted, and kernels be listed. A small
transformer trains there with clipping and two microbatches. All figures are those of a step, beyond what the step does
by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "tests" / "device" / "plugin"


def main() -> int:
    """Run the bench in a process where torch has the device."""
    paths = (str(PLUGIN), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.run([sys.executable, "-m", "bench._device"], env=environment, check=False).returncode
