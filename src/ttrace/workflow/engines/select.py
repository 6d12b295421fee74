"""This module makes the engine that a check is to use; what an engine needs is imported only if it is chosen."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Literal

from ttrace.errors import TTraceError
from ttrace.judge.engine import Engine, Threads, num_cores
from ttrace.trace.format import END, MANIFEST
from ttrace.workflow.engines.processes import Processes, variant
from ttrace.workflow.run import Run, Strictness

Name = Literal["threads", "processes", "torchrun", "ray"]


@contextmanager
def chosen(name: Name, num_workers: int, run: Run, strictness: Strictness) -> Iterator[Engine]:
    """The engine of this name; it ends with the block. 0 workers: as many as there are cores, up to eight."""
    if name == "torchrun":
        from ttrace.workflow.engines.torchrun import Torchrun

        job = Torchrun(run.folder / f"check-{_fingerprint(run, strictness)}")
        yield job
        job.close()
    elif name == "ray":
        try:
            from ttrace.workflow.engines.ray_cluster import Rays
        except ImportError:
            raise TTraceError("--engine ray needs Ray: pip install 'torch-ttrace[ray]'.") from None
        rays = Rays(num_workers)
        try:
            yield rays
        finally:
            rays.close()
    else:
        kind = Processes if name == "processes" else Threads
        yield kind(num_workers or num_cores())


def speaks(name: Name) -> bool:
    """Whether this process tells what was found: of the ranks of a job only the first."""
    return name != "torchrun" or os.environ.get("RANK", "0") == "0"


def _fingerprint(run: Run, strictness: Strictness) -> str:
    """Differs as soon as the traces do, or the way they are judged."""
    found = hashlib.sha256(f"{metadata.version('torch-ttrace')} {strictness.margin} {variant()}".encode())
    for name in (MANIFEST, END):
        for path in sorted(run.folder.rglob(name)):
            state = path.stat()
            found.update(f"{path.relative_to(run.folder)} {state.st_size} {state.st_mtime_ns}\n".encode())
    return found.hexdigest()[:16]
