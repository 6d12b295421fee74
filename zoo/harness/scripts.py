"""The case of entries in which a framework as released is wrong: an unchanged script, on releases of its packages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ttrace.judge.verdict import Exit
from zoo.bug import Judge, Launcher
from zoo.frameworks.rows import SCRIPTS
from zoo.harness.cells import Traced
from zoo.harness.runs import NUM_TWINS
from zoo.harness.with_wheels import run_on, unpack_release
from zoo.launch import Sided
from zoo.seen import Seen
from zoo.versions.runs import run as run_command

BESIDE_TRANSFORMERS = (
    "huggingface_hub==1.33.0",
    "tokenizers==0.22.1",
    "httpx==0.28.1",
    "httpcore==1.0.9",
)
"""What releases of transformers between 5.5 and 5.14 need beside them, in place of what is installed."""


@dataclass(frozen=True)
class Script:
    """A script of zoo/frameworks, and how each side is started: its arguments and its releases."""

    script: str
    reference: str = ""
    candidate: str = ""
    reference_wheels: tuple[str, ...] = ()
    candidate_wheels: tuple[str, ...] = ()
    num_ranks: int = 2

    @property
    def launcher(self) -> Launcher:
        return on_scripts

    def make_command(self, out: Path) -> list[str]:
        """Make the command that traces and judges both sides."""
        reference = f"python {run_on(self.reference_wheels)}{SCRIPTS}/{self.script} {self.reference}"
        torchrun = f"torchrun --standalone --nproc-per-node {self.num_ranks}"
        candidate = f"{torchrun} {run_on(self.candidate_wheels)}{SCRIPTS}/{self.script} {self.candidate}"
        options = ("--twins", str(NUM_TWINS), "--no-repeat", "--no-isolate", "--out", str(out))
        return [sys.executable, "-m", "ttrace", "run", *options, "--reference", reference, "--candidate", candidate]


def on_scripts(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:  # noqa: ARG001
    """The launcher of scripts: each run starts its own processes."""
    kept = []
    for run in runs:
        case, begin = cast(Script, run.case), time.monotonic()
        for wheel in (*case.reference_wheels, *case.candidate_wheels):
            unpack_release(wheel)  # not on two ranks at once
        status, output = run_command(case.make_command(folder / str(run)), {**os.environ, "OMP_NUM_THREADS": "1"})
        if status not in (Exit.PASSED, Exit.FOUND):
            raise AssertionError(f"{run} ended with {status}:\n{output}")
        seconds = time.monotonic() - begin
        kept.append(replace(judge(Traced(folder / str(run), folder / str(run) / "candidate")), seconds=seconds))
    return kept
