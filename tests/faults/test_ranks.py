"""One rank of several fails, hangs, never starts or is another version: there is no verdict, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_machine.machine import FaultCase, Trials

CLEAN = (0, "86 tensors of 2 ranks", 0, "86 PASS")
UNFINISHED = r"rank-0000\d is incomplete: .* the run ended without closing it, so nothing can be judged"
SLOW = "did not end within {} s.*a longer --timeout"
FULL = "No space left on device"
OTHER = "the ranks belong to different runs. Rank 1 has {}, but rank 0 has"

CASES = (
    FaultCase("none", "", *CLEAN),
    FaultCase("killed", "1@begin1:signal:SIGKILL", 2, "ended with status 1", 2, UNFINISHED, 1),
    FaultCase("killed-before-attach", "1@start:signal:SIGKILL", 2, "ended with status 1", 2, "holds no run", 0),
    FaultCase("raises", "1@begin1:raise:oops", 2, "RuntimeError: oops", 2, UNFINISHED, None),
    FaultCase("ends-in-a-step", "1@begin1:exit:0", 2, "ended with status 1", 2, UNFINISHED, 1),
    FaultCase("hangs", "1@begin1:hang", 2, SLOW.format(9), 2, UNFINISHED, 1, options="--timeout 9"),
    FaultCase("never-starts", "1@start:exit:0", 2, SLOW.format(7), 2, "holds no run", 0, options="--timeout 7"),
    FaultCase(
        "disk-full-at-start",
        "1@start:shim:ERROR:28:write:manifest:0:999",
        *(2, f"rank-00001 cannot be written, so nothing is traced: .*{FULL}", 2, "rank 1 of 2 left no trace", None),
    ),
    FaultCase(
        "disk-full",
        "1@start:shim:ERROR:28:write:chunk-:0:999",
        *(2, f"rank-00001 could not be completed, so it is not a valid trace: .*{FULL}", 2, UNFINISHED),
    ),
    FaultCase(
        "disk-full-for-a-while",
        "1@start:shim:ERROR:28:write:chunk-:0:1",
        *(2, f"could not be recorded: OSError: .*{FULL}", 2, f"could not be recorded: OSError: .*{FULL}"),
    ),
    FaultCase(
        "disk-full-at-close",
        "1@start:shim:ERROR:28:write:.end.json:0:999",
        *(2, f"rank-00001 could not be completed, so it is not a valid trace: .*{FULL}", 2, UNFINISHED),
    ),
    FaultCase(
        "disk-full-in-the-ledger",
        "1@start:shim:ERROR:28:write:collectives:2:1",
        *(0, "86 tensors", 2, r"rank-00001/collectives\.jsonl is damaged"),
    ),
    FaultCase("slow-disk", "1@start:shim:SLOW:100:rank-", *CLEAN),
    FaultCase("clock-set-back", "1@begin0:shim:CLOCK:-86400", *CLEAN),
    FaultCase(
        "another-ttrace",
        "1@start:version:torch-ttrace:0.0.9",
        2,
        OTHER.format("ttrace 0.0.9"),
        2,
        "belong to different runs",
    ),
    FaultCase(
        "another-torch", "1@start:version:torch:2.8.0", 2, OTHER.format("torch 2.8.0"), 2, "belong to different runs"
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_fails_is_no_verdict(trials: Trials, tmp_path: Path, case: FaultCase) -> None:
    trials.verify(case, tmp_path, num_ranks=2)
