"""Versions of torch and Python on which TTrace runs: `python -m zoo.versions` measures them and writes the page.

Every cell is a pair of a Python and a torch. In each, the fast tests and the examples are run. What was measured is
kept in docs/measured/versions.json, so that single cells can be measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ttrace.report.health import FIRST_SUPPORTED
from ttrace.torch_compat import list_limits, parse_release
from zoo.harness.torches.environment import OWN, ROOT, make_environment
from zoo.harness.torches.wheels import IN_CI, PYTHON, VERSIONS

MEASURED = ROOT / "docs" / "measured" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
CELLS = (*((PYTHON, torch) for torch in VERSIONS), ("3.12", OWN), ("3.13", OWN))
FAST = "not slow and not nightly"
TORCH_FACING = ("tests/test_modules.py", "tests/adapters", "tests/laws", "tests/capture")
"""The tests of what touches torch most."""
MINUTES = 30
"""For one command, on a busy machine."""
ADVICE = "run it again with --only, and read what it prints"


@dataclass(frozen=True)
class Example:
    """A script of examples/, run as a reference and by torchrun on two ranks."""

    script: str
    exit: int
    """What `ttrace run` ends with: 0 if it passes, 1 if it finds the bug."""
    exit_before: tuple[tuple[int, int], int] | None = None
    """A version of torch, and what it ends with below it."""

    @property
    def name(self) -> str:
        return self.script.replace(".py", "")

    def expect(self, torch: str) -> int:
        if self.exit_before is not None and parse_release(torch) < self.exit_before[0]:
            return self.exit_before[1]
        return self.exit


EXAMPLES = (
    Example("hidden_allreduce.py", 0),
    Example("hidden_allreduce.py --bug", 1),
    Example("dtensor_tp.py", 0),
    Example("dtensor_tp.py --bug", 1),
    Example("ddp.py", 0),
    Example("ddp.py --bug norm", 1),
    Example("fsdp2.py", 0, ((2, 9), 1)),
    Example("pipelining.py", 0, ((2, 7), 2)),
    Example("pipelining.py --bug", 1, ((2, 7), 2)),
)


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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.versions", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="VERSION", help="only cells of these versions of torch")
    parser.add_argument("--python", nargs="+", metavar="VERSION", help="only cells of these versions of Python")
    parser.add_argument("--ci", action="store_true", help=f"only the tests that touch torch, on {', '.join(IN_CI)}")
    chosen = parser.parse_args(arguments)
    if chosen.ci:
        return max(_run_torch_facing(torch) for torch in IN_CI)
    cells = [(p, t) for p, t in CELLS if (not chosen.only or t in chosen.only)]
    cells = [(p, t) for p, t in cells if not chosen.python or p in chosen.python]
    kept = read_cells()
    for python, torch in cells:
        kept[(python, torch)] = measure(python, torch)
        write_cells(kept)
    measured = [kept[cell] for cell in cells]
    bad = [cell for cell in measured if cell.is_supported and not cell.is_good]
    for cell in bad:
        print(f"Python {cell.python}, torch {cell.torch}: {len(cell.failed)} tests failed, {cell.unexpected}: {ADVICE}")
    print(f"versions: {len(measured) - len(bad)} of {len(measured)} as they should be (bar: all)")
    return int(bool(bad))


def measure(python: str, torch: str) -> Cell:
    variables = make_environment(python, torch)
    print(f"Python {python}, torch {torch}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ttrace-versions-") as folder:
        doctor, _ = _run(["ttrace", "doctor", "--out", folder], variables)
        examples = {example.name: _run_example(example, Path(folder), variables) for example in EXAMPLES}
    _, output = _run(["python", "-m", "pytest", "-q", "-m", FAST, "-n", "2", "--dist", "loadscope"], variables)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    cell = Cell(python, torch, _count("passed", output), _count("skipped", output), tuple(failed), examples, doctor)
    print(f"  {cell.passed} passed, {len(failed)} failed, {examples}", flush=True)
    return cell


def _run_example(example: Example, folder: Path, variables: dict[str, str]) -> int:
    reference = f"python examples/{example.script.split()[0]}"
    candidate = f"torchrun --standalone --nproc-per-node 2 examples/{example.script}"
    out = folder / example.name.replace(" ", "")
    options = ["--twins", "1", "--no-repeat", "--timeout", "120", "--out", str(out)]
    status, output = _run(["ttrace", "run", *options, "--reference", reference, "--candidate", candidate], variables)
    if status != example.exit:
        print(output)
    return status


def _run_torch_facing(torch: str) -> int:
    command = ["python", "-m", "pytest", "-q", "-m", FAST, "-n", "2", "--dist", "loadscope", *TORCH_FACING]
    status, output = _run(command, make_environment(PYTHON, torch))
    print(output if status else f"torch {torch}: {output.splitlines()[-1]}", flush=True)
    return status


def _run(command: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Run to the end, or kill it with all that it started; return the status and what it printed."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = -process.wait()
        printed.seek(0)
        return status, printed.read()


def _count(outcome: str, output: str) -> int:
    found = re.findall(rf"(\d+) {outcome}", output)
    return int(found[-1]) if found else 0


def read_cells() -> dict[tuple[str, str], Cell]:
    rows = json.loads(MEASURED.read_text()) if MEASURED.exists() else []
    cells = [Cell(**{**row, "failed": tuple(row["failed"])}) for row in rows]
    return {(cell.python, cell.torch): cell for cell in cells}


def write_cells(cells: dict[tuple[str, str], Cell]) -> None:
    ordered = [cells[cell] for cell in CELLS if cell in cells]
    MEASURED.write_text(json.dumps([asdict(cell) for cell in ordered], indent=1) + "\n")
    PAGE.write_text(format_page(ordered))


def format_page(cells: list[Cell]) -> str:
    """The page of what was measured."""
    names = " | ".join(f"`{example.name}`" for example in EXAMPLES)
    rows = [_format_row(cell) for cell in cells]
    limits = {limit: None for cell in cells for limit in list_limits(cell.torch)}
    off = [
        f"- Below {major}.{minor}: {limit.feature}; {limit.reason}."
        for limit in limits
        for major, minor in [limit.below]
    ]
    return _TEXT.format(
        names=names, line="|---" * (3 + len(EXAMPLES)) + "|", rows="\n".join(rows), limits="\n".join(off)
    )


def _format_row(cell: Cell) -> str:
    tests = f"{cell.passed} passed" + (f", {len(cell.failed)} failed" if cell.failed else "")
    outcomes = {0: "passes", 1: "finds it", 2: "off"}
    examples = []
    for example in EXAMPLES:
        status = cell.examples.get(example.name, -1)
        text = outcomes.get(status, f"exit {status}")
        examples.append(text if status == example.expect(cell.torch) else f"**{text}**")
    return f"| {cell.torch} | {cell.python} | {tests} | {' | '.join(examples)} |"


_TEXT = """# Versions

`.ci/versions` runs all of this and writes this page. The fast tests and the examples ran with each pair of torch and
Python below, on CPU with gloo. An example *passes* if every tensor agrees with the reference, and *finds it* if
`ttrace run` reports the bug. What ended otherwise than it should is bold.

| torch | Python | fast tests | {names} |
{line}
{rows}

Supported are torch 2.8 to 2.15. Of 2.6 and 2.7 everything works that is not listed here; `ttrace doctor` lists what is
off in the version that you have:

{limits}

`fsdp2` is a true finding below 2.9: gloo's `reduce_scatter_tensor` sums where FSDP2 asks for the average, so gradients
are twice as large on two ranks.
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
