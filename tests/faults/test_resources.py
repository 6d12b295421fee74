"""A process without files, memory or a right clock spoils the trace at most, never the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_machine.machine import FaultCase, Trials

CLEAN = (0, "86 tensors", 0, "86 PASS")
FILES = "Too many open files"
UNFINISHED = "rank-00000 is incomplete: .* the run ended without closing it, so nothing can be judged"
MEMORY = "could not be recorded: OSError: .*Cannot allocate memory"
DAY = 86_400
"""Seconds."""

CASES = (
    # Open files
    FaultCase("no-files-at-start", "start:files:0", 2, f"is not a plan: .*{FILES}", 2, "run holds no run", 0),
    FaultCase("one-file-at-start", "start:files:1", 2, f"could not be completed.*{FILES}", 2, UNFINISHED),
    FaultCase("no-files-after-attach", "attached:files:0", 2, f"could not be completed.*{FILES}", 2, UNFINISHED),
    FaultCase("no-files-in-the-last-step", "begin1:files:0", *CLEAN),
    FaultCase(
        "no-files-for-a-while",
        "attached:files:0 updated1:lift",
        *(2, f"could not be recorded: OSError: .*{FILES}", 2, f"could not be recorded: OSError: .*{FILES}"),
    ),
    # Memory: the arena takes 16 MB
    FaultCase("no-memory-for-the-arena", "attached:memory:12000000 updated1:lift", 2, MEMORY, 2, MEMORY),
    FaultCase("no-memory-for-a-step", "attached:memory:12000000 begin1:lift", 2, MEMORY, 2, MEMORY),
    FaultCase("no-memory-in-the-last-step", "begin1:memory:4000000", *CLEAN),
    # The time of day
    FaultCase("clock-set-back-a-day", f"begin0:shim:CLOCK:-{DAY}", *CLEAN),
    FaultCase("clock-set-back-between-steps", f"stepped0:shim:CLOCK:-{400 * DAY}", *CLEAN),
    FaultCase("clock-before-1970", "start:shim:CLOCK:-2000000000", *CLEAN),
    FaultCase("clock-of-2120", "forward0:shim:CLOCK:3000000000", *CLEAN),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_process_without_resources_trains_as_before(trials: Trials, tmp_path: Path, case: FaultCase) -> None:
    trials.verify(case, tmp_path)
