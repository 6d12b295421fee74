"""Upload of a rank's trace to a store while the step continues.

The writer writes to the local disk as always. Each closed chunk is put into the store in the background and removed
from the disk; then the records so far are put, which only name chunks that are there. The manifest comes first and the
end last, under names that only this rank writes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from ttrace.errors import TraceError
from ttrace.trace.collectives import COLLECTIVES
from ttrace.trace.format import END, MANIFEST, RECORDS
from ttrace.trace.storage.worker import Worker
from ttrace.trace.store import Remote

_MOST_WAITING = 2
"""Chunks that are closed and not yet in the store; with the open one, what the local disk holds."""


class Upload:
    """The upload of one rank's folder, from `spool` to a store."""

    def __init__(self, folder: Remote) -> None:
        self.folder = folder
        self.spool = Path(tempfile.mkdtemp(prefix="ttrace-"))
        self._thread = Worker("ttrace-upload")
        self._waiting: deque[tuple[str, Future[None]]] = deque()
        self.problems: list[str] = []

    def begin(self) -> None:
        """Remove an earlier trace under this name, its end first, and put the manifest."""
        for name in (END, RECORDS, COLLECTIVES):
            (self.folder / name).unlink()
        (self.folder / MANIFEST).put(self.spool / MANIFEST)

    def add(self, chunk: Path) -> None:
        """Add a chunk that is closed and whose records are written; wait if too many others are still on the disk."""
        records = (self.spool / RECORDS).read_text(encoding="utf-8")
        self._waiting.append((chunk.name, self._thread.submit(self._put_chunk, chunk, records)))
        while len(self._waiting) > _MOST_WAITING:
            self._settle()

    def settle(self) -> None:
        """Wait for all of them; chunks that could not be stored are listed in `problems`."""
        while self._waiting:
            self._settle()

    def close(self) -> None:
        """Put the records and the end."""
        (self.folder / RECORDS).put(self.spool / RECORDS)
        if (self.spool / COLLECTIVES).exists():
            (self.folder / COLLECTIVES).put(self.spool / COLLECTIVES)
        (self.folder / END).put(self.spool / END)

    def discard(self) -> None:
        """End the thread, and remove the spool; what is in the store stays there."""
        self._thread.close()
        shutil.rmtree(self.spool, ignore_errors=True)

    def _put_chunk(self, chunk: Path, records: str) -> None:
        try:
            (self.folder / chunk.name).put(chunk)
            (self.folder / RECORDS).write_text(records)
        finally:
            chunk.unlink()

    def _settle(self) -> None:
        name, future = self._waiting.popleft()
        try:
            future.result()
        except (OSError, TraceError) as error:
            self.problems.append(f"{self.folder / name} could not be stored, nor the tensors in it: {error}")
