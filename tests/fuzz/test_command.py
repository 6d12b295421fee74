"""The command notices every kind of failure, and says how to repeat it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.harness.limits import HANG

pytest.importorskip("atheris", reason="it has no wheel for this Python")
ROOT = Path(__file__).parents[2]


def run_fuzz(*arguments: str) -> tuple[int, list[str]]:
    """Run the command; return its exit code and what it prints."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("planted-error", "KeyError at"),
        ("planted-delay", "more than 2 s"),
        ("planted-memory", "more than 256 MiB"),
        ("planted-death", "the process ended: crash"),
    ],
)
def test_a_planted_failure_is_found_and_can_be_repeated(target: str, what: str) -> None:
    status, lines = run_fuzz(target, "--runs", "3")
    assert status == 1
    assert lines[-1].endswith("inputs, 1 failures")
    at = next(number for number, line in enumerate(lines) if line.strip().startswith(what))
    repeat = shlex.split(lines[at + 1])
    assert repeat[:4] == ["python", "-m", "fuzz", target]
    assert run_fuzz(*repeat[3:])[0] != 0


def test_inputs_that_are_refused_are_no_failures() -> None:
    status, lines = run_fuzz("ids", "--runs", "200")
    assert (status, lines) == (0, [lines[0], "fuzz: 200 inputs, 0 failures"])
    assert lines[0].startswith("ids: 200 inputs, 0 failures")
