"""The command `python -m zoo frameworks`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ttrace.judge.verdict import Exit
from zoo.frameworks.outcomes import measure_row
from zoo.frameworks.page import Measured
from zoo.frameworks.rows import ROWS


def measure_frameworks(prefixes: Sequence[str]) -> int:
    """Measure the rows whose name begins with one of these, or all; write the page; return the exit code.

    What was measured is kept, so that single rows can be measured again.
    """
    measured = Measured.read()
    rows = [row for row in ROWS if not prefixes or row.name.startswith(tuple(prefixes))]
    for row in rows:
        with tempfile.TemporaryDirectory(prefix="ttrace-frameworks-") as folder:
            outcome = measured.outcomes[row.name] = measure_row(row, Path(folder) / "run", row.bugs)
        print(f"{row.name}: exit {outcome.exit}, bugs {outcome.bugs}, {outcome.seconds} s", flush=True)
        measured.write()
    num_good = sum(measured.outcomes[row.name].is_good for row in rows)
    num_false = sum(measured.outcomes[row.name].exit == Exit.FOUND for row in rows)
    print(f"frameworks: {num_good} of {len(rows)} rows good, {num_false} false alarms (bar: all rows, 0)")
    return int(num_good < len(rows) or not rows)
