"""Object stores: the few operations of a folder that a trace needs, by URL, through fsspec.

Objects are put as a whole and requested by name; they are never renamed, and listings are not used, because they may
omit new objects. A request that fails is repeated several times, with growing pauses.

`Upload` puts a rank's trace into a store while the step continues. The writer writes to the local disk as always. Each
closed chunk is put into the store in the background and removed from the disk; then the records so far are put, so they
only name chunks that are there. The manifest is put first and the end last, under names that only this rank writes.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ttrace.errors import TraceError
from ttrace.trace.buffered_file import Worker
from ttrace.trace.collectives import COLLECTIVES
from ttrace.trace.format import END, MANIFEST, RECORDS

Answer = TypeVar("Answer")

_NUM_TRIES = 7
_FIRST_PAUSE = 0.05
"""The first pause, in seconds; each further pause is about twice as long."""
_CACHE_BYTES = 256 << 20
"""The size of the cache. The same parameter is read for itself and for its update."""
_MOST_WAITING = 2
"""How many closed chunks may wait for their upload. With the open one, these are what the local disk holds."""


class Remote:
    """A folder or an object in a store, with the same method names as a `Path`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def exists(self) -> bool:
        try:
            self._request(lambda files, path: files.info(path))
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        return self._request(lambda files, path: bytes(files.cat_file(path)))

    def read(self, begin: int, end: int) -> bytearray:
        """Read only these bytes, through a cache."""
        key = (self.url, begin, end)
        data = _cache.find(key)
        if data is None:
            data = bytearray(self._request(lambda files, path: files.cat_file(path, start=begin, end=end)))
            if len(data) < end - begin:
                raise OSError(f"it ends at {begin + len(data)}, before {end}")
            _cache.add(key, data)
        return data

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self._request(lambda files, path: files.pipe_file(path, text.encode(encoding)))

    def put(self, file: Path) -> None:
        """Put a file, in several parts if it is large; the object becomes visible only when it is complete."""
        self._request(lambda files, path: files.put_file(str(file), path))

    def unlink(self) -> None:
        """Remove the object, if it is there."""
        with suppress(FileNotFoundError):
            self._request(lambda files, path: files.rm_file(path))

    def _request(self, request: Callable[[Any, str], Answer]) -> Answer:
        files, path = _open(self.url)
        for tried in range(1, _NUM_TRIES + 1):
            try:
                return request(files, path)
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # each store raises its own exception when it is busy
                if tried == _NUM_TRIES:
                    raise TraceError(
                        f"{self.url}: the store failed {tried} times, the last time with {error!r}."
                    ) from error
            time.sleep(_FIRST_PAUSE * 2**tried * random.uniform(0.5, 1.0))
        raise AssertionError("the last try returns or raises")


Place = Path | Remote
"""The place of a trace."""


def parse_place(text: str) -> Place:
    """Parse a path or a URL such as `s3://bucket/run`; a URL with `file://` is a path."""
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return Remote(text) if "://" in text else Path(text)


class Upload:
    """The upload of one rank's folder, from `spool` to a store."""

    def __init__(self, folder: Remote) -> None:
        self.folder = folder
        self.spool = Path(tempfile.mkdtemp(prefix="ttrace-"))
        self._thread = Worker("ttrace-upload")
        self._waiting: deque[tuple[str, Future[None]]] = deque()
        self.problems: list[str] = []

    def begin(self) -> None:
        """Remove an earlier trace under this name, starting with its end, and put the manifest."""
        for name in (END, RECORDS, COLLECTIVES):
            (self.folder / name).unlink()
        (self.folder / MANIFEST).put(self.spool / MANIFEST)

    def add(self, chunk: Path) -> None:
        """Add a closed chunk whose records are written; wait if too many chunks are still on the disk."""
        records = (self.spool / RECORDS).read_text(encoding="utf-8")
        self._waiting.append((chunk.name, self._thread.submit(self._put_chunk, chunk, records)))
        while len(self._waiting) > _MOST_WAITING:
            self._settle()

    def settle(self) -> None:
        """Wait for all uploads; chunks that could not be stored are listed in `problems`."""
        while self._waiting:
            self._settle()

    def close(self) -> None:
        """Put the records and the end."""
        (self.folder / RECORDS).put(self.spool / RECORDS)
        if (self.spool / COLLECTIVES).exists():
            (self.folder / COLLECTIVES).put(self.spool / COLLECTIVES)
        (self.folder / END).put(self.spool / END)

    def discard(self) -> None:
        """End the thread and remove the spool; objects in the store stay."""
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
            self.problems.append(f"{self.folder / name} could not be stored, so its tensors are missing: {error}")


class _Cache:
    """Cache of the bytes that were read last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: OrderedDict[tuple[str, int, int], bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: tuple[str, int, int]) -> bytearray | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def add(self, key: tuple[str, int, int], data: bytearray) -> None:
        with self._lock:
            if key in self._held or len(data) > self._max_bytes:
                return
            self._held[key] = data
            self._num_bytes += len(data)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._held.popitem(last=False)[1])

    def forget(self) -> None:
        with self._lock:
            self._held.clear()
            self._num_bytes = 0


_cache = _Cache(_CACHE_BYTES)
forget = _cache.forget
"""Empty the cache; needed after a trace was written again under the same name."""


def _open(url: str) -> tuple[Any, str]:
    protocol, _, path = url.partition("://")
    return _filesystem(protocol), path


@lru_cache(maxsize=8)
def _filesystem(protocol: str) -> Any:
    try:
        import fsspec

        # A cached listing would omit what other ranks have written since.
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise TraceError(
            f"{protocol}:// needs fsspec and its store: pip install 'torch-ttrace[stores]' ({error})."
        ) from None
