"""Unpacked wheels of torch that run on a CPU, whatever they were built for."""

from __future__ import annotations

import sys
from pathlib import Path

from zoo.harness.torches.stub import drop_requirements, replace_cuda
from zoo.harness.wheels import unpack

VERSIONS = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
"""One of each minor version."""

IN_CI = ("2.8.0", VERSIONS[-1])
"""The oldest that is supported in full, and the newest. The environment itself has 2.13; nightly runs have all."""

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def unpack_torch(version: str, python: str = PYTHON) -> Path:
    """Return the folder to put first on `sys.path`, downloaded unless it is there."""
    return unpack(f"torch=={version}", f"torch-{version}-cp{python.replace('.', '')}", python=python, prepare=_prepare)


def _prepare(folder: Path) -> None:
    replace_cuda(folder)
    drop_requirements(folder)
    for tool in (folder / "torch" / "bin").iterdir():  # zipfile does not keep the permission
        tool.chmod(0o755)


if __name__ == "__main__":
    for version in sys.argv[1:] or IN_CI:
        print(unpack_torch(version))
