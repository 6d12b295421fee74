"""Command line: `python -m zoo.harness.with_wheels "WHEEL ..." SCRIPT [ARGUMENT ...]` runs a script on other releases.

Each wheel is a requirement such as `transformers==5.14.1`, unpacked in the cache and put first on `sys.path`. This must
not import torch, of which there may be another release, too.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.harness.wheels import unpack

SOURCES = ("deepspeed",)
"""Packages that have no wheels on the index: they are built, without their compiled operations."""


def unpack_release(requirement: str) -> Path:
    package, _, version = requirement.partition("==")
    if package == "torch":
        from zoo.harness.torches.wheels import unpack_torch

        return unpack_torch(version)
    return unpack(requirement, requirement.replace("==", "-"), is_source=package in SOURCES)


def run_on(wheels: Sequence[str]) -> str:
    """Return what stands before the name of a script in a command that runs it on these."""
    return f"-m zoo.harness.with_wheels {shlex.quote(' '.join(wheels))} " if wheels else ""


def main(requirements: str, script: str, *arguments: str) -> None:
    folders = [str(unpack_release(requirement)) for requirement in requirements.split()]
    sys.path[:0] = [str(Path(script).parent), *folders]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])  # for its own processes
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
