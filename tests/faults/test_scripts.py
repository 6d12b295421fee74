"""What scripts do to their own process changes neither the training nor, where it goes on, its trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_machine.machine import FaultCase, Trials

CLEAN = (0, "86 tensors", 0, "86 PASS")
UNFINISHED = "rank-00000 is incomplete: .* the run ended without closing it, so nothing can be judged"
NEVER = "succeeded, but its rank 0 never finished the traced steps"
NO_CANDIDATE = "run holds no run"

CASES = (
    # Forks
    FaultCase("fork-that-exits", "begin0:fork:exit", *CLEAN),
    FaultCase("fork-that-ends-at-once", "forward0:fork:at_once", *CLEAN),
    FaultCase("fork-that-trains-on", "begin0:fork:both", *CLEAN),
    FaultCase("fork-that-trains-on-other-data", "begin0:fork:other", *CLEAN),
    FaultCase("fork-between-steps", "stepped0:fork:other", *CLEAN),
    FaultCase("fork-before-attach", "start:fork:exit", *CLEAN),
    FaultCase("fork-that-stays", "begin0:fork:daemon", *CLEAN, is_slow=True),
    # Other programs
    FaultCase("exec-in-a-step", "forward0:exec:true", 2, NEVER, 2, UNFINISHED, 0),
    FaultCase("exec-before-attach", "start:exec:true", 2, "succeeded but left no trace", 2, NO_CANDIDATE, 0),
    FaultCase("exec-that-fails", "forward0:exec:false", 2, "ended with status 1", 2, UNFINISHED, 0),
    FaultCase("daemon", "begin0:daemon stepped0:hang", 2, NEVER, 2, UNFINISHED, None, is_slow=True),
    # The end
    FaultCase("killed-in-a-step", "forward0:signal:SIGKILL", 2, "ended with status -9", 2, UNFINISHED, 0),
    FaultCase("crashed-in-a-step", "forward1:signal:SIGSEGV", 2, "ended with status -11", 2, UNFINISHED, 1),
    FaultCase("ended-in-a-step", "forward1:signal:SIGTERM", 2, "ended with status -15", 2, UNFINISHED, 1),
    FaultCase("exit-in-a-step", "updated0:exit:0", 2, NEVER, 2, UNFINISHED, 1),
    FaultCase("exit-with-a-status", "stepped0:exit:3", 2, "ended with status 3", 2, UNFINISHED, 1),
    # Standard output, folder, user, and modes of files
    FaultCase("output-closed-before-attach", "start:close", *CLEAN),
    FaultCase("output-closed-after-attach", "attached:close", *CLEAN),
    FaultCase("folder-changed-before-attach", "start:chdir:/", *CLEAN),
    FaultCase("folder-changed-in-a-step", "forward0:chdir:/proc", *CLEAN),
    FaultCase("folder-removed", "start:gone", *CLEAN),
    FaultCase("umask-077", "start:umask:077", *CLEAN),
    FaultCase("umask-777", "start:umask:777", *CLEAN),
    FaultCase(
        "umask-777-of-a-user",
        "start:umask:777 start:nobody",
        *(2, "cannot be written, so nothing is traced: .*Permission denied", 2, NO_CANDIDATE, 0),
        before="chmod 777 RUN",
    ),
    FaultCase("another-user", "start:nobody", *CLEAN, before="chmod 777 RUN"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_script_that_changes_its_process_trains_as_before(trials: Trials, tmp_path: Path, case: FaultCase) -> None:
    trials.verify(case, tmp_path)
