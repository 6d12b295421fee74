"""Wheels that are unpacked side by side outside the repository, and not installed.

A version becomes current when its folder is put first on `sys.path`, so that one environment runs all of them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "TTRACE_WHEELS"
"""The folder to keep them in; by default one in the user's cache."""


def find_cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "ttrace" / "wheels"
    return Path(os.environ.get(VARIABLE, default)).expanduser()


def unpack(
    requirement: str,
    name: str,
    *,
    python: str | None = None,
    is_source: bool = False,
    prepare: Callable[[Path], None] | None = None,
) -> Path:
    """Return the folder to put on `sys.path`, downloaded unless it is there.

    The requirements of the wheel are not followed, since they would bring another torch. `python` is the version of the
    interpreter that will import it, by default this one. `is_source` is for packages without wheels: they are built.
    `prepare` changes the folder before anybody sees it.
    """
    folder = find_cache() / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            unpacked = _download(requirement, Path(work), python, is_source=is_source)
            if prepare is not None:
                prepare(unpacked)
            with contextlib.suppress(OSError):  # another process was quicker: its folder is as good
                unpacked.rename(folder)
    return folder


def _download(requirement: str, work: Path, python: str | None, *, is_source: bool) -> Path:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    ready = ["download", "--only-binary=:all:", f"--dest={work}", *([f"--python-version={python}"] if python else [])]
    kind = ["wheel", f"--wheel-dir={work}"] if is_source else ready
    subprocess.run([*pip, *kind, "--no-deps", requirement], check=True)
    [file] = work.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(work / "unpacked")
    file.unlink()
    return work / "unpacked"
