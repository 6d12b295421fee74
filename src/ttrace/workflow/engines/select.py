"""Selection of a check's engine; what an engine needs is imported only if it is selected."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from ttrace.errors import TTraceError
from ttrace.judge.engine import Engine, Threads, count_cores
from ttrace.trace.format import END, MANIFEST
from ttrace.workflow.engines.engine_name import EngineName
from ttrace.workflow.engines.processes import Processes, kernel_variant
from ttrace.workflow.run import Run, RunTraces, Strictness


@contextmanager
def open_engine(name: EngineName, num_workers: int, traces: RunTraces[Any], strictness: Strictness) -> Iterator[Engine]:
    """Make the engine of this name for the length of a block; 0 workers means one per core, up to eight."""
    if isinstance(traces, Run) and name == "torchrun":
        from ttrace.workflow.engines.torchrun import Torchrun

        job = Torchrun(traces.folder / f"check-{_fingerprint(traces, strictness)}")
        yield job
        job.close()
    elif name == "ray":
        try:
            from ttrace.workflow.engines.ray_cluster import RayTasks
        except ImportError:
            raise TTraceError("--engine ray needs Ray: pip install 'torch-ttrace[ray]'.") from None
        rays = RayTasks(num_workers)
        try:
            yield rays
        finally:
            rays.close()
    else:
        kind = Processes if name == "processes" else Threads
        yield kind(num_workers or count_cores())


def _fingerprint(run: Run, strictness: Strictness) -> str:
    """Return a text that differs as soon as the traces do, or the way they are judged."""
    digest = hashlib.sha256(f"{metadata.version('torch-ttrace')} {strictness.margin} {kernel_variant()}".encode())
    for name in (MANIFEST, END):
        for path in sorted(run.folder.rglob(name)):
            state = path.stat()
            digest.update(f"{path.relative_to(run.folder)} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
