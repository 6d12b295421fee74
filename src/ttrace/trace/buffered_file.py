"""File that is written front to back through an arena: memory that mirrors the end of the file.

The arena has two buffers. While one is filled, a thread writes the other one. Where the file system allows it
(O_DIRECT), the write bypasses the page cache, because filling pages of the cache takes more CPU time than everything
else a writer does. The bytes that were appended last stay in memory for a while and can be compared there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

from ttrace.untrusted import create_file
from ttrace.values.checksum import copy_with_checksum

ALIGNED = 4096
"""The alignment of direct writes, in the file and in memory."""
_WRITE_BYTES = 256 << 10
"""The most bytes of one call through the page cache. With more, the kernel looks for larger pages, which took up to
three times the CPU time."""


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Arena:
    """Two buffers and the thread that writes them; made when needed, and used by one file at a time."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = max(ALIGNED, buffer_bytes // ALIGNED * ALIGNED)

    def close(self) -> None:
        self.thread.close()
        vars(self).pop("buffers", None)  # a closed trace holds no memory

    @cached_property
    def buffers(self) -> tuple[memoryview, memoryview]:
        return _pages(self.buffer_bytes), _pages(self.buffer_bytes)

    @cached_property
    def thread(self) -> Worker:
        return Worker("ttrace-writer")


class BufferedFile:
    """A file that grows at its end. Bytes of a write that failed are lost; `loss` returns the reason."""

    def __init__(self, path: Path, begin: int, arena: Arena) -> None:
        assert begin % ALIGNED == 0, "the first direct write would be refused"
        self.end = begin
        """Where the next byte goes."""
        self.settled = begin
        """Everything in front of this was passed to the operating system, or is lost."""
        self._begin = begin
        self._arena = arena
        self._buffer_end = begin + arena.buffer_bytes
        self._writing: Future[None] | None = None
        self._losses: list[tuple[int, int, OSError]] = []
        self._file = create_file(path, os.O_RDWR)

    def append(self, part: memoryview, crc: int = 0) -> int:
        """Append some bytes; return the checksum of them and those before, whose checksum is `crc`."""
        while part:
            if self.end == self._buffer_end:
                self._turn()
            room = self._piece(self.end, len(part))
            crc = copy_with_checksum(_address(part), len(room), _address(room), crc)
            self.end += len(room)
            part = part[len(room) :]
        return crc

    def reaches(self, at: int) -> bool:
        """Whether the bytes at this place are still in the arena."""
        return at >= max(self._begin, self._buffer_end - 2 * self._arena.buffer_bytes)

    def holds(self, part: memoryview, at: int) -> bool:
        """Whether exactly these bytes are at this place, which must still be in the arena."""
        while part:
            piece = self._piece(at, len(part))
            if _memcmp(_address(piece), _address(part), len(piece)):
                return False
            at += len(piece)
            part = part[len(piece) :]
        return True

    def flush(self) -> None:
        """Pass everything to the operating system."""
        self._wait()
        if self.settled < self.end:
            self._write(self.settled, self._piece(self.settled, self.end - self.settled))
            self.settled = self.end

    def loss(self, begin: int, end: int) -> OSError | None:
        """Return why one of these bytes, which must be settled, is not in the file."""
        for start, stop, error in self._losses:
            if begin < stop and start < end:
                return error
        return None

    def close(self, front: bytes) -> None:
        """Fill in the front of the file and put everything on disk. If that fails, it can be tried again."""
        self.flush()
        write_at(self._file, 0, front)
        os.truncate(self._file, self.end)
        os.fsync(self._file)
        os.close(self._file)

    def _piece(self, at: int, num_bytes: int) -> memoryview:
        """The memory of these bytes, as many of them as one buffer holds."""
        number, start = divmod(at - self._begin, self._arena.buffer_bytes)
        return self._arena.buffers[number % 2][start : start + num_bytes]

    def _turn(self) -> None:
        """Write the full buffer in the thread and continue in the other one, once that has been written."""
        self._wait()
        at = self._buffer_end - self._arena.buffer_bytes
        self._writing = self._arena.thread.submit(self._write_directly, at, self._piece(at, self._arena.buffer_bytes))
        self._buffer_end += self._arena.buffer_bytes

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None
            self.settled = self._buffer_end - self._arena.buffer_bytes

    def _write_directly(self, at: int, data: memoryview) -> None:
        written = 0
        try:
            _set_direct(self._file, wanted=True)
            while written < len(data):
                written += os.pwrite(self._file, data[written:], at + written)
        except OSError:
            pass  # not every file system allows it, and none does after a write that ended between two blocks
        finally:
            _set_direct(self._file, wanted=False)
        if written < len(data):
            self._write(at + written, data[written:])

    def _write(self, at: int, data: memoryview) -> None:
        end = at + len(data)
        try:
            while at < end:
                at += os.pwrite(self._file, data[len(data) - (end - at) :][:_WRITE_BYTES], at)
        except OSError as error:
            # What was settled before is still there: the write that failed would only have repeated it.
            self._losses.append((max(at, self.settled), end, error))


def _pages(num_bytes: int) -> memoryview:
    """Allocate anonymous pages: they are aligned, and take memory once they are accessed.

    They are private, because few kernels use huge pages for shared memory. A direct write pins every page, which took
    half of its CPU time with small pages.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def open_lines(path: Path) -> FileIO:
    """Open a new file of lines, without a buffer."""
    return FileIO(create_file(path), "wb")


def write_at(file: int, at: int, data: bytes) -> None:
    """Write at a given place, to overwrite an earlier write that a full disk left unfinished."""
    view = memoryview(data)
    while view:
        num_bytes = os.pwrite(file, view[:_WRITE_BYTES], at)
        view, at = view[num_bytes:], at + num_bytes


def _set_direct(file: int, *, wanted: bool) -> None:
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Worker:
    """One thread beside the training step, which does one task after the other.

    The last step may end with the script. The interpreter starts no thread then, so the caller does the task itself.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)  # starts with the first task

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._pool.submit(task, *arguments)
        except RuntimeError:  # the interpreter is ending; tasks that were submitted before are done
            done: Future[Any] = Future()
            try:
                done.set_result(task(*arguments))
            except Exception as error:
                done.set_exception(error)
            return done

    def close(self) -> None:
        """Wait for everything that was submitted."""
        self._pool.shutdown()
