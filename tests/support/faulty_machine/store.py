"""An object store with faults, `faulty://`: a folder of the disk, whose answers the variable STORE_FAULT changes.

It has the form `FAULT:PART`, for objects whose path has this part.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PAUSE = 0.05
"""Seconds that a slow store takes for an answer."""


class FaultyStore(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Store in which objects are put whole, as in S3."""

    protocol = "faulty"
    num_requests = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    def _meet(self, path: str) -> str:
        """Fail as the variable says, or return the fault that changes the answer."""
        fault, _, part = os.environ.get("STORE_FAULT", "").partition(":")
        if part not in path:
            return ""
        FaultyStore.num_requests += 1
        if fault == "gone" or (fault == "busy" and FaultyStore.num_requests % 3):
            raise ConnectionResetError("the store does not answer")
        if fault == "denied":
            raise PermissionError("403")
        if fault == "slow":
            time.sleep(PAUSE)
        return fault

    def info(self, path: str, **options: Any) -> Any:
        if self._meet(path) == "unlisted":
            raise FileNotFoundError(path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        return [] if self._meet(path) == "stale" else super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        fault = self._meet(path)
        old = Path(f"{path}.old")  # what a store that is behind still has
        data = bytearray(
            super().cat_file(str(old) if fault == "behind" and old.exists() else path, start, end, **options)
        )
        if fault == "wrong":
            data[len(data) // 2] ^= 1
        return bytes(data[: len(data) // 2] if fault == "short" else data)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        self._meet(path)
        return super().pipe_file(path, value, **options)

    def put_file(self, source: str, path: str, **options: Any) -> Any:
        fault = self._meet(path)
        if Path(path).exists():
            Path(path).replace(f"{path}.old")
        super().put_file(source, path, **options)
        if fault == "spoilt":
            data = bytearray(Path(path).read_bytes())
            data[-9] ^= 1
            Path(path).write_bytes(data)

    def rm_file(self, path: str) -> Any:
        self._meet(path)
        if Path(path).exists():
            Path(path).replace(f"{path}.old")
        else:
            raise FileNotFoundError(path)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
