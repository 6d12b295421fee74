"""The arena: what is appended arrives, whatever the sizes and whatever the file system thinks of direct writes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ttrace.trace.buffered_file import ALIGNED, Arena, BufferedFile

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
