"""Free space and speed of the disk to which traces will be written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from ttrace.report.health import DiskHealth
from ttrace.workflow.disk_space import find_existing

_BLOCK, _NUM_BLOCKS = 8 << 20, 8
_LONGEST = 5.0
"""Seconds after which a slow disk is known well enough."""


def measure_disk(folder: Path) -> DiskHealth:
    """Measure the disk of a folder that may not exist yet; whatever happens, no file is left."""
    existing = find_existing(folder)
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return DiskHealth(folder, error=error.strerror or str(error))
    try:
        return DiskHealth(folder, free, _measure_speed(existing))
    except OSError as error:
        return DiskHealth(folder, free, error=error.strerror or str(error))


def _measure_speed(folder: Path) -> float:
    block = os.urandom(_BLOCK)  # a file system may compress what is regular
    start, num_bytes = time.monotonic(), 0
    # Without a name where the system allows it: the file then ends with this process, however that ends.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_NUM_BLOCKS):
            num_bytes += file.write(block)
            os.fsync(file.fileno())
            if time.monotonic() - start > _LONGEST:
                break
        return num_bytes / max(time.monotonic() - start, 1e-9)
