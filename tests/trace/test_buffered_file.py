"""The arena: what is appended arrives, whatever the sizes and whatever the file system thinks of direct writes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ttrace.trace.buffered_file import ALIGNED, Arena, BufferedFile, Worker
from ttrace.trace.reader import Trace

FRONT = ALIGNED


def stream_into(path: Path, arena: Arena, parts: list[bytes]) -> BufferedFile:
    stream = BufferedFile(path, FRONT, arena)
    for part in parts:
        stream.append(memoryview(bytearray(part)))
    return stream


def some_parts(*sizes: int) -> list[bytes]:
    chance = random.Random(0)
    return [chance.randbytes(size) for size in sizes]


PARTS = some_parts(1, 0, 4095, 4096, 5000, 100_000, 3, 8192, 2 * ALIGNED - 3, 4096 * 5)


@pytest.mark.parametrize("buffer_bytes", [1, ALIGNED, 5 * ALIGNED, 1 << 20])
@pytest.mark.parametrize("flushes", [False, True])
def test_what_is_appended_arrives(tmp_path: Path, buffer_bytes: int, *, flushes: bool) -> None:
    arena, path = Arena(buffer_bytes), tmp_path / "file"
    stream = BufferedFile(path, FRONT, arena)
    wanted = b""
    for part in PARTS:
        stream.append(memoryview(bytearray(part)))
        wanted += part
        if flushes:
            stream.flush()
        assert stream.settled == stream.end or not flushes
        assert path.read_bytes()[FRONT : stream.settled] == wanted[: stream.settled - FRONT]
    stream.close(b"front")
    arena.close()
    assert path.read_bytes() == b"front".ljust(FRONT, b"\0") + wanted


def test_a_refused_direct_write_goes_through_the_page_cache(tmp_path: Path) -> None:
    """Every file system that can write directly refuses memory that is not aligned."""
    arena, path = Arena(2 * ALIGNED), tmp_path / "file"
    arena.buffers = tuple(buffer[8 : 8 + 2 * ALIGNED] for buffer in Arena(3 * ALIGNED).buffers)  # type: ignore[assignment]  # two, too
    stream = stream_into(path, arena, PARTS)
    stream.close(b"")
    assert stream.loss(FRONT, stream.end) is None
    assert path.read_bytes()[FRONT:] == b"".join(PARTS)


def test_bytes_are_compared_as_far_back_as_the_arena_reaches(tmp_path: Path) -> None:
    old, new = some_parts(2 * ALIGNED, 2 * ALIGNED - 100)
    stream = stream_into(tmp_path / "file", Arena(ALIGNED), [old, new])
    at = FRONT + len(old)
    assert not stream.reaches(FRONT)
    assert stream.reaches(at)
    assert stream.holds(memoryview(bytearray(new)), at)
    assert stream.holds(memoryview(bytearray(new[100:])), at + 100)
    for changed in (0, ALIGNED - 1, ALIGNED, len(new) - 1):
        other = bytearray(new)
        other[changed] ^= 1
        assert not stream.holds(memoryview(other), at)
    stream.close(b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_does_not_write_into_the_arena_of_its_parent() -> None:
    memory = Arena(ALIGNED).buffers[0]
    memory[0] = 1
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        memory[0] = 2
        os._exit(0)
    assert memory[0] == 1


# The thread beside the step; and what is recorded when the script has ended already.


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
