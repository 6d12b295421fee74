"""Unpacked megatron-core wheels, kept side by side outside the repository.

They are not installed: a version becomes current when its folder is put first on `sys.path`, so that one environment
runs all of them. Requirements are not followed, since they would bring another torch; `numpy` and `packaging`, which
our own tools need too, are all that the wheels use here. `python -m zoo.harness.megatron.wheels` downloads all of
them, so that no test has to wait.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VARIABLE = "TTRACE_WHEELS"
"""The folder to keep them in; by default one in the user's cache."""

NEWEST = "0.16.1"
"""The last one for Python 3.11."""

TESTED = (
    "0.5.0",
    "0.6.0",
    "0.7.0",
    "0.8.0",
    "0.9.0",
    "0.10.0",
    "0.11.0",
    "0.12.3",
    "0.13.0",
    "0.14.0",
    "0.15.3",
    NEWEST,
)
"""The ones that tests run or read."""


def wheel(version: str = NEWEST) -> Path:
    """The folder to put on `sys.path`, downloaded unless it is there."""
    folder = cache() / f"megatron-core-{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            unpacked = _unpacked(version, Path(work))
            with contextlib.suppress(OSError):  # another process was quicker: its folder is as good
                unpacked.rename(folder)
    return folder


def cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "ttrace" / "wheels"
    return Path(os.environ.get(VARIABLE, default)).expanduser()


def _unpacked(version: str, work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    kind = ["--no-deps", "--only-binary=:all:", f"--dest={work}"]
    subprocess.run([*pip, *kind, f"megatron-core=={version}"], check=True)
    [file] = work.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(work / "unpacked")
    return work / "unpacked"


if __name__ == "__main__":
    for tested in TESTED:
        print(wheel(tested))
