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

from ttrace.torch_compat import parse_release
from zoo.harness.torches.environment import ROOT

MINUTES = 30
"""For one command, on a busy machine."""


@dataclass(frozen=True)
class Example:
    """A script of examples/, run as a reference and by torchrun on two ranks."""

    script: str
    exit: int
    """What `ttrace run` ends with: 0 if it passes, 1 if it finds the bug."""
    exit_before: tuple[tuple[int, int], int] | None = None
    """A version of torch, and what it ends with below it."""
    python: str = "python"
    """What runs the reference."""
    rank: str = ""
    """What stands between torchrun and the script."""

    @property
    def name(self) -> str:
        return self.script.replace(".py", "")

    def expect(self, torch: str) -> int:
        if self.exit_before is not None and parse_release(torch) < self.exit_before[0]:
            return self.exit_before[1]
        return self.exit

    def run(self, folder: Path, variables: Mapping[str, str], torch: str) -> int:
        """Return what `ttrace run` ends with; print what it printed if that is not what it should be."""
        script, launch = f"{self.rank}examples/{self.script}", "torchrun --standalone --nproc-per-node"
        reference = f"{self.python} {self.rank}examples/{self.script.split()[0]}"
        options = ["--twins", "1", "--no-repeat", "--no-isolate", "--out", str(folder / self.name.replace(" ", ""))]
        sides = ["--reference", reference, "--candidate", f"{launch} 2 {script}"]
        status, output = run(["ttrace", "run", *options, *sides], variables)
        if status != self.expect(torch):
            print(output, flush=True)
        return status


def run(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run to the end, or kill it with all that it started; return the status and what it printed."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
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
