"""Runs of tests and examples in an environment of other versions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrace.compat.torch import parse_release
from zoo.harness.torches.environment import ROOT

MINUTES = 30
"""For one command, on a busy machine."""


OFF = 2
"""The exit of an example that needs what a version of torch does not have."""


@dataclass(frozen=True)
class Example:
    """A script of examples/, run as a reference and by torchrun on two ranks."""

    script: str
    exit: int
    """What `ttrace run` ends with: 0 if it passes, 1 if it finds the bug."""
    exit_before: tuple[tuple[tuple[int, int], int], ...] = ()
    """Versions of torch, oldest first, and what it ends with below each."""
    python: str = "python"
    """What runs the reference."""
    rank: str = ""
    """What stands between torchrun and the script."""

    @property
    def name(self) -> str:
        return self.script.replace(".py", "")

    def expect(self, torch: str) -> int:
        return next((status for below, status in self.exit_before if parse_release(torch) < below), self.exit)

    def run(self, folder: Path, variables: Mapping[str, str], torch: str) -> int:
        """Return what `ttrace run` ends with; print what it printed if that is not what it should be.

        What is off in this version of torch is not run: it would crash or hang.
        """
        if self.expect(torch) == OFF:
            return OFF
        script, launch = f"{self.rank}examples/{self.script}", "torchrun --standalone --nproc-per-node"
        reference = f"{self.python} {self.rank}examples/{self.script.split()[0]}"
        options = ["--twins", "1", "--no-repeat", "--no-isolate", "--out", str(folder / self.name.replace(" ", ""))]
        sides = ["--reference", reference, "--candidate", f"{launch} 2 {script}"]
        status, output = run(["ttrace", "run", *options, *sides], variables)
        if status != self.expect(torch):
            print(output, flush=True)
        return status


def run(command: Sequence[str], variables: Mapping[str, str], folder: Path = ROOT) -> tuple[int, str]:
    """Run to the end, or kill it with all that it started; return the status and what it printed."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:  # also when this process is told to end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return status, printed.read()
