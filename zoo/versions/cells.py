"""Cells: each is one Python with one torch, in which the fast tests and the examples run."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ttrace.compat.torch import parse_release
from ttrace.report.health import FIRST_SUPPORTED
from zoo.harness.torches.environment import OWN, make_environment
from zoo.harness.torches.wheels import PYTHON, VERSIONS
from zoo.versions.runs import OFF, Example, run

CELLS = (*((PYTHON, torch) for torch in VERSIONS), ("3.12", OWN), ("3.13", OWN))
EXAMPLES = (
    Example("unchanged.py", 0, (((2, 7), OFF), ((2, 9), 1))),
    Example("unchanged.py --bug", 1, (((2, 7), OFF),)),
    Example("hidden_allreduce.py", 0),
    Example("hidden_allreduce.py --bug", 1),
    Example("dtensor_tp.py", 0),
    Example("dtensor_tp.py --bug", 1),
    Example("ddp.py", 0),
    Example("ddp.py --bug norm", 1),
    Example("fsdp2.py", 0, (((2, 7), OFF), ((2, 9), 1))),
    Example("pipelining.py", 0, (((2, 8), OFF), ((2, 9), 0), ((2, 10), OFF))),
    Example("pipelining.py --bug", 1, (((2, 8), OFF), ((2, 9), 1), ((2, 10), OFF))),
)
PYTEST = ("python", "-m", "pytest", "-q", "-m", "not slow and not nightly", "-n", "2", "--dist", "loadscope")
TORCH_FACING = (
    "tests/test_modules.py",
    "tests/adapters",
    "tests/automatic/test_watch.py",
    "tests/automatic/test_frameworks.py",
    "tests/laws",
    "tests/capture",
)
"""The tests of what touches torch most."""
OTHERS = ("--ignore", "tests/zoo/test_versions.py")
"""All fast tests but those of what this writes."""


@dataclass(frozen=True)
class Cell:
    """What was measured of one Python with one torch."""

    python: str
    torch: str
    passed: int
    skipped: int
    failed: tuple[str, ...]
    """Names of tests."""
    examples: dict[str, int]
    """What each example ended with."""
    doctor: int
    """What `ttrace doctor` ended with."""

    @property
    def is_supported(self) -> bool:
        return parse_release(self.torch) >= FIRST_SUPPORTED

    @property
    def unexpected(self) -> list[str]:
        """Examples that ended otherwise than they should."""
        return [e.name for e in EXAMPLES if self.examples.get(e.name) != e.expect(self.torch)]

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.unexpected and self.doctor == 0


def measure_cell(python: str, torch: str) -> Cell:
    variables = make_environment(python, torch)
    with tempfile.TemporaryDirectory(prefix="ttrace-versions-") as folder:
        doctor, _ = run(["ttrace", "doctor", "--out", folder], variables)
        examples = {example.name: example.run(Path(folder), variables, torch) for example in EXAMPLES}
    status, output = run([*PYTEST, *OTHERS], variables)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status:
        failed = failed or [f"pytest ended with {status}"]  # it did not start, or not end
        print(output, flush=True)
    return Cell(python, torch, _count("passed", output), _count("skipped", output), tuple(failed), examples, doctor)


def run_torch_facing(torch: str) -> int:
    """Run the tests of what touches torch most, on another version of it; print their summary, or everything."""
    status, output = run([*PYTEST, *TORCH_FACING], make_environment(PYTHON, torch))
    print(output if status else f"torch {torch}: {output.splitlines()[-1]}", flush=True)
    return status


def _count(outcome: str, output: str) -> int:
    found = re.findall(rf"(\d+) {outcome}", output)
    return int(found[-1]) if found else 0
