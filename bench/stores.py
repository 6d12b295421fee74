"""A run written and checked on disk and in a local S3 server, where 2% of requests fail or are slow.

The verdicts must be the same, number by number, and of the tensors no more may be read than 1.1 times their bytes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench._s3 import BUCKET, s3, served
from bench._tensors import write_run
from ttrace.judge.engine import Threads
from ttrace.report.machine.json_report import as_json
from ttrace.trace.reader import Trace
from ttrace.trace.store import Remote
from ttrace.workflow.run import Run, RunTraces

FAULTS, READ = 0.01, 1.1
"""The share of requests that fail, and of those that are slow; the bar on bytes."""
NUM_TENSORS, SHAPE, WRONG = 300, (128, 128), 7


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, s3(FAULTS) as address:
        local, remote = Path(folder) / "run", Remote(f"s3://{BUCKET}/run")
        write_run(local, NUM_TENSORS, SHAPE, wrong=WRONG)
        start = time.perf_counter()
        write_run(remote, NUM_TENSORS, SHAPE, wrong=WRONG)
        written = time.perf_counter()
        on_disk = as_json(Run(local).judge(engine=Threads(2)), "")
        start_check = time.perf_counter()
        in_store = as_json(RunTraces(remote).judge(engine=Threads(8)), "")
        end = time.perf_counter()
        said = served(address)
        needed = sum(_num_bytes(Trace(path)) for path in (local / "reference", local / "twin-1", local / "candidate"))
    ratio, is_same = said["bytes"] / needed, on_disk == in_store
    print(f"{said['requests']} requests, {said['failed']} of them failed; written in {written - start:.1f} s")
    print(
        f"stores: verdicts {'the same' if is_same else 'DIFFER'} ({on_disk['counts']}), read {ratio:.3f} of the "
        f"{needed / 1e6:.0f} MB needed in {end - start_check:.1f} s (bar {READ})"
    )
    return int(not is_same or ratio > READ or not said["failed"])


def _num_bytes(trace: Trace) -> int:
    places = {(rank.manifest.rank, r.chunk, r.begin, r.end) for rank in trace.ranks for r in rank.records}
    return sum(end - begin for _, _, begin, end in places)
