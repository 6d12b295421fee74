"""What `ttrace run` says of the script of a row, as it is and with bugs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrace.judge.verdict import Exit
from zoo.frameworks.rows import Row
from zoo.harness.with_wheels import unpack_release
from zoo.versions.runs import run


@dataclass(frozen=True)
class Outcome:
    """What was measured of one row."""

    row: str
    version: str
    exit: int
    """What `ttrace run` ended with on the script as it is."""
    num_tensors: int
    num_added_lines: int
    bugs: dict[str, int]
    """What `ttrace run` ended with for each planted bug."""
    places: dict[str, str]
    """The first wrong tensor of each bug that was found."""
    seconds: float
    """The time of `ttrace run` on the script as it is, from an empty folder."""

    @property
    def is_clean(self) -> bool:
        return self.exit == Exit.PASSED and self.num_tensors > 0

    @property
    def num_found(self) -> int:
        return sum(status == Exit.FOUND for status in self.bugs.values())

    @property
    def is_good(self) -> bool:
        return self.is_clean and self.num_added_lines == 0 and self.num_found == len(self.bugs)


def measure_row(row: Row, out: Path, bugs: Sequence[str]) -> Outcome:
    """Check the script as it is and with these bugs; print what `ttrace run` printed where it ended otherwise.

    All runs share a folder, which keeps the reference: a bug does not change it.
    """
    for wheel in row.wheels:
        unpack_release(wheel)  # not on two ranks at once
    begin = time.monotonic()
    status, report = _run(row, out)
    seconds = round(time.monotonic() - begin, 1)
    broken = {bug: _run(row, out, bug) for bug in bugs}
    return Outcome(
        row.name,
        f"{row.package} {row.version}",
        status,
        sum(report.get("counts", {}).values()),
        row.count_added_lines(),
        {bug: exit_ for bug, (exit_, _) in broken.items()},
        {bug: _name_first(found) for bug, (exit_, found) in broken.items() if exit_ == Exit.FOUND},
        seconds,
    )


def _run(row: Row, out: Path, bug: str = "") -> tuple[int, dict[str, Any]]:
    report = out / "report.json"
    report.unlink(missing_ok=True)
    status, output = run(row.make_command(out, bug), {**os.environ, "OMP_NUM_THREADS": "1"})
    if status != (Exit.FOUND if bug else Exit.PASSED):
        print(f"{row.name} {bug}\n{output}", flush=True)
    return status, json.loads(report.read_text()) if report.exists() else {}


def _name_first(report: dict[str, Any]) -> str:
    first = report["findings"][0]
    return f"{first['module']}/{first['kind']}"
