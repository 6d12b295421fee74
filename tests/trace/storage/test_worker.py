"""The thread beside the step; and what is recorded when the script has ended already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ttrace.trace.reader import Trace
from ttrace.trace.storage.worker import Worker

LATE = """
import atexit, sys, torch
from pathlib import Path
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Manifest, Record
from ttrace.trace.writer import BUFFER_BYTES, Writer

writer = Writer(Path(sys.argv[1]), Manifest(role="reference", rank=0, num_ranks=1, mesh="", seed=0))
tensor = torch.randn(BUFFER_BYTES // 8)

def record(number):
    tensor_id = TensorId.parse(f"0/-/layers.{number}.weight/param_after")
    shape = tuple(tensor.shape)
    writer.write(Record(tensor_id, shape, tensor.dtype, Region.whole(shape)), tensor + number)

@atexit.register
def late():
    for number in range(5, 10):
        record(number)
    writer.close(End(num_steps=1))

for number in range(5):
    record(number)
"""
"""Records more than both buffers hold, before its end and after."""


def test_a_step_that_ends_with_its_script_is_recorded_in_full(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    trace = Trace(tmp_path)
    assert list(trace.problems()) == []
    tensors = [shards[0].read_stored() for shards in trace.shards.values()]
    assert len(tensors) == 10
    assert [round(float((tensor - tensors[0]).mean())) for tensor in tensors] == list(range(10))


def test_tasks_are_done_in_their_order_and_errors_are_kept() -> None:
    worker = Worker("test")
    done: list[int] = []
    first, second = worker.submit(done.append, 1), worker.submit(done.append, 2)
    failed = worker.submit(int, "no number")
    worker.close()
    assert (first.result(), second.result(), done) == (None, None, [1, 2])
    late = worker.submit(done.append, 3), worker.submit(int, "no number")
    assert done == [1, 2, 3]
    for future in (failed, late[1]):
        with pytest.raises(ValueError, match="no number"):
            future.result()
