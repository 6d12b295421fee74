"""Object stores: the few operations of a folder that a trace needs, by URL, through fsspec.

Nothing is renamed, and nothing is listed to find new objects: objects are put whole and requested by name. A request
that fails is repeated several times, with growing pauses.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ttrace.errors import TraceError

Answer = TypeVar("Answer")

_NUM_TRIES = 7
_FIRST_PAUSE = 0.05
"""Seconds; each further pause is about twice as long."""
_CACHE_BYTES = 256 << 20
"""The size of the cache of bytes: the same parameter is read for itself and for its update."""


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
        """Read these bytes, and no others, through a cache."""
        key = (self.url, begin, end)
        found = _cache.find(key)
        if found is None:
            found = bytearray(self._request(lambda files, path: files.cat_file(path, start=begin, end=end)))
            if len(found) < end - begin:
                raise OSError(f"it ends at {begin + len(found)}, before {end}")
            _cache.keep(key, found)
        return found

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self._request(lambda files, path: files.pipe_file(path, text.encode(encoding)))

    def put(self, file: Path) -> None:
        """Put the whole file, in parts if it is large; the object is never visible in part."""
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
            except Exception as error:  # each store has its own exception for being busy
                if tried == _NUM_TRIES:
                    raise TraceError(f"{self.url}: the store failed {tried} times, at last with {error!r}.") from error
            time.sleep(_FIRST_PAUSE * 2**tried * random.uniform(0.5, 1.0))
        raise AssertionError("the last try returns or raises")


Place = Path | Remote
"""Where a trace is."""


def parse_place(text: str) -> Place:
    """Parse a path or a URL: `s3://bucket/run`, `gs://...`; `file://` is a path."""
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return Remote(text) if "://" in text else Path(text)


class _Cache:
    """The bytes that were read last."""

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

    def keep(self, key: tuple[str, int, int], data: bytearray) -> None:
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
"""Empty the cache, after a trace was written again under the same name."""


def _open(url: str) -> tuple[Any, str]:
    protocol, _, path = url.partition("://")
    return _filesystem(protocol), path


@lru_cache(maxsize=8)
def _filesystem(protocol: str) -> Any:
    try:
        import fsspec

        # A cached listing would miss what other ranks have written since.
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise TraceError(
            f"{protocol}:// needs fsspec and its store: pip install 'torch-ttrace[stores]' ({error})."
        ) from None
