"""A disk that is full, broken, slow or read-only spoils the trace, never the training, and there is no verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_machine.machine import FaultCase, Trials

SMALL = "mkdir FOLDER && mount -t tmpfs -o size=4m tmpfs FOLDER"
"""The candidate's folder is a disk of its own."""
WHOLE = "mkdir -p tmp/r && cp -r RUN/. tmp/r && mount -t tmpfs -o size=9m tmpfs RUN && mv tmp/r/* RUN && rm -r tmp/r"
"""The whole run's folder is."""
UNWRITABLE = "candidate/rank-00000 cannot be written, so nothing is traced: .*{}.* or choose another --out"
INCOMPLETE = "candidate/rank-00000 could not be completed, so it is not a valid trace: .*{}.* or choose another --out"
LOST = r"could not be recorded: OSError: .*{}.* further problems"
NO_CANDIDATE = "run holds no run"
UNFINISHED = "rank-00000 is incomplete: .* the run ended without closing it, so nothing can be judged"
FULL, BROKEN, LARGE = "No space left on device", "Input/output error", "File too large"

CASES = (
    # A small disk
    FaultCase("full-at-start", "start:fill:FOLDER:0", 2, UNWRITABLE.format(FULL), 2, NO_CANDIDATE, 0, before=SMALL),
    *(
        FaultCase(
            f"full-{moment.lower()}",
            f"attached:fill:FOLDER:{moment}",
            2,
            INCOMPLETE.format(FULL),
            2,
            UNFINISHED,
            before=SMALL,
        )
        for moment in ("MID_CHUNK", "MID_RECORD", "MID_HEADER", "AT_CLOSE")
    ),
    FaultCase(
        "full-for-a-step",
        "attached:fill:FOLDER:10 begin1:remove:FOLDER/filler",
        *(2, LOST.format(FULL), 2, LOST.format(FULL)),
        before=SMALL,
    ),
    FaultCase(
        "full-with-its-log",
        "attached:fill:RUN:8",
        *(2, "ended with status 1", 2, r"run/\.lock cannot be written: .*No space left"),
        before=WHOLE,
    ),
    # A limit of file sizes
    FaultCase("limited-in-a-chunk", "attached:size:270000", 2, INCOMPLETE.format(LARGE), 2, UNFINISHED),
    FaultCase("limited-in-a-header", "updated1:size:100000", 2, INCOMPLETE.format(LARGE), 2, UNFINISHED),
    FaultCase("limited-in-records", "updated1:size:3000", 2, INCOMPLETE.format(LARGE), 2, UNFINISHED),
    # Errors of a disk
    *(
        FaultCase(f"broken-{name}", f"start:shim:ERROR:5:{call}:0:999", 2, sentence.format(BROKEN), 2, check, steps)
        for name, call, sentence, check, steps in (
            ("write-of-chunks", "write:chunk-", INCOMPLETE, UNFINISHED, 2),
            ("open-of-chunks", "open:chunk-", LOST, LOST.format(BROKEN), 2),
            ("sync-of-chunks", "fsync:chunk-", INCOMPLETE, UNFINISHED, 2),
            ("write-of-records", "write:records", INCOMPLETE, UNFINISHED, 2),
            ("open-of-records", "open:candidate/rank-00000/records", UNWRITABLE, "incomplete: 0 records", 0),
            ("sync-of-records", "fsync:records", INCOMPLETE, UNFINISHED, 2),
            ("write-of-the-manifest", "write:manifest", UNWRITABLE, NO_CANDIDATE, 0),
            ("rename-of-the-manifest", "rename:manifest", UNWRITABLE, NO_CANDIDATE, 0),
            ("write-of-the-end", "write:.end.json", INCOMPLETE, UNFINISHED, 2),
            ("sync-of-the-end", "fsync:.end.json", INCOMPLETE, UNFINISHED, 2),
            ("rename-of-the-end", "rename:end.json", INCOMPLETE, UNFINISHED, 2),
        )
    ),
    FaultCase(
        "broken-once-in-a-chunk",
        "start:shim:ERROR:5:write:chunk-:1:1",
        *(2, LOST.format(BROKEN), 2, LOST.format(BROKEN)),
    ),
    FaultCase("broken-once-in-records", "start:shim:ERROR:5:write:records:0:1", 0, "86 tensors", 0, "86 PASS"),
    # A disk that is slow, or writes less than it is asked to
    FaultCase("slow", "start:shim:SLOW:60:rank-", 0, "86 tensors", 0, "86 PASS"),
    FaultCase("short-writes", "start:shim:SHORT:rank-", 0, "86 tensors", 0, "86 PASS"),
    # Permissions
    FaultCase(
        "read-only-disk",
        "start:mount:-o:remount,ro:FOLDER",
        *(2, UNWRITABLE.format("Read-only file system"), 2, NO_CANDIDATE, 0),
        before=SMALL,
    ),
    FaultCase(
        "read-only-in-a-step",
        "begin0:shim:ERROR:30:write:rank-:0:999",
        2,
        INCOMPLETE.format("Read-only"),
        2,
        UNFINISHED,
    ),
    FaultCase("of-another-user", "start:nobody", 2, UNWRITABLE.format("Permission denied"), 2, NO_CANDIDATE, 0),
    FaultCase("of-another-user-in-a-step", "attached:nobody", 2, INCOMPLETE.format("Permission denied"), 2, UNFINISHED),
    FaultCase("folder-that-vanishes", "begin0:remove:FOLDER", 2, INCOMPLETE.format("No such file"), 2, NO_CANDIDATE),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_faulty_disk_spoils_the_trace_only(trials: Trials, tmp_path: Path, case: FaultCase) -> None:
    trials.verify(case, tmp_path)
